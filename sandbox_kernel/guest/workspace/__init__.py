"""The sandbox's half of persist and hydrate. docs/workspace.md describes the format of trees and
docs/wire.md the messages.

layout     chunks, trees and how they are written; shared with the host
messages   messages over a socket; shared with the host
folders    opening folders and files without following symlinks; shared with the host
known      what a scan knows about files and folders
mapped     files that processes write to through memory
glance     which folders of a large known tree have not changed
scan       a folder as a tree, with what is known from the last time
offer      what the host lacks is sent to it
apply      files, as the host wants them
helper     does all this for a connection
process    the helper's process, beside the agent
"""
