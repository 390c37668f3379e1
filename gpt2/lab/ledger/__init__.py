"""A ledger of ideas: each idea is compared with the best so far, and few false ideas are kept."""
