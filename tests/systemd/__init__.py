"""Jails whose cgroups come from a real systemd, in a machine of its own."""
