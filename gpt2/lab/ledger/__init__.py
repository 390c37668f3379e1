"""A ledger of ideas: each idea is compared with the best version so far, and kept if it is better.

Start reading at __main__.py; then trial.py (the loop over pairs), journal.py (the file),
evidence.py (the test), referee.py (the score) and training_text.py (the text that runs read).
"""
