"""Test suites of Jupyter's own projects, run on our kernel; what they leave behind is counted."""
