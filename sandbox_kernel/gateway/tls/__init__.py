"""TLS ended at the gateway, for targets whose requests a rule looks at.

extra       whether the packages for it are installed
roots       the certificates that this machine trusts
authority   a certificate authority for one sandbox, whose key is in memory only
stream      TLS over another connection
termination ends TLS on both sides and has the requests inside served
"""
