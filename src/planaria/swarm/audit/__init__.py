"""An audit before a model is given away: what it gives away in pieces, and what lies beside its weights."""
