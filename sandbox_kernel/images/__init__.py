"""Images for sandboxes that boot one, and the packages that an image may lack."""
