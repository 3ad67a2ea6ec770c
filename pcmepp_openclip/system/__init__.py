"""Modules that know no model: `files`, the `digest` of a file, a name for `tensors`, child `processes`, the `network`
between ranks, the `launcher` of other programs, `redact` for secrets in text, `text` for users' mistakes, `errors`, and
the `version`."""
