"""Options of the families of Hugging Face models."""

LLAMA = "norm=rmsnorm position=rope activation=swiglu bias=False"
NEOX = "position=rope parallel_block=True tie_embeddings=False"
