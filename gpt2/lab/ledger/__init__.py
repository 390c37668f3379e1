"""A ledger of ideas: each idea is compared with the best so far, and kept if it is better."""
