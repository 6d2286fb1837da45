"""The OpenAI Agents SDK's own tests, unmodified, with our client in place of its Unix-local one."""
