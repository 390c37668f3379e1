"""Find out from a trace of training steps where their time goes."""
