"""Prepare a corpus: encode its documents, and store the tokens in a folder."""
