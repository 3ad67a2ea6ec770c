"""Helpers that know no model: `files`, the `digest` of a file and a name for `tensors`, child `processes`, the
`network` between ranks, the `flags` of a command, `redact` for secrets in text, `text` for users' mistakes, `errors`,
and the `version`."""
