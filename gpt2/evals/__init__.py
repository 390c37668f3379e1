"""Tasks that are scored from local files, each by a published convention."""
