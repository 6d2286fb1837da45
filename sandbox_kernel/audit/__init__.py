"""What happened to each sandbox, and by whom: lines of JSON in ``<data>/audit``, only appended to.

``note`` records one event of a sandbox: any layer above calls it where the thing happens. What the
gateway lets out, and what not, it records itself (``gateway.audit``). Nothing here ends what it
records: a failure is logged once.

trail      which events are kept of a sandbox, where, and who has caused them
event_log  the file: appended to, rotated
reading    events of one or many files, as they were and as they come
upkeep     old audits go
shipping   copies of events for a program of the operator's
"""

from sandbox_kernel.audit.event_log import AuditLog, Event, Sink
from sandbox_kernel.audit.trail import Trail, note, note_command

__all__ = ["AuditLog", "Event", "Sink", "Trail", "note", "note_command"]
