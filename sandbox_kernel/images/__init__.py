"""Images for sandboxes that boot one, and packages for the interpreters in them.

target        what an interpreter is, as far as it decides which wheels fit
wheels        packages for such an interpreter, resolved and cached on the host
archives      reads tar archives of any origin safely
layers        writes layers reproducibly
contents      what is in an image, found by reading its layers
interpreter   finds the Python in there
oci           OCI image layouts on disk
debian        a small Debian as a base
build         puts an image together
image_store   the images that were built, by name (``resolve``)
"""
