"""JupyterLab in a real browser. Run it with ``make test-browser``, which installs both."""
