"""The egress gateway: the one way out of a sandbox, on the host.

It resolves, decides, dials and audits. ``Gateway`` serves connections that come from a sandbox, or
from the standalone command `sandbox-kernel gateway`; whoever connects is hostile.

names           what a client names, as a checked host and port
addresses       which addresses may be dialled; resolves once and dials what was checked
decisions       what a policy says of a connection or a request, and the words for it
gate            the live policy: rate limits, changes at run time
proxy_protocol  tells HTTP and SOCKS clients apart
http_head       heads of HTTP/1 messages, read strictly; http_body: framing
socks           SOCKS5
tls_hello       the name in a TLS ClientHello
http_forward    forwards HTTP/1, request by request
tls             ends TLS where requests must be read (the extra ``gateway``)
http2           forwards HTTP/2, request by request
relay           copies bytes both ways
rewriting       what is changed in messages that are read: the seam for secrets
secret_*        secrets: where values come from, how they are held, put in and taken out
placeholders    what stands for a secret in the sandbox
replacing       replaces in streams; framed_replacing: in WebSocket and gRPC messages
sigv4           signs requests to AWS again
gateway         puts these together, for one connection at a time
audit           what happened, as JSON lines
presets         @pip, @npm and @conda in rules
policy_file     policies in files, read again when they change
"""
