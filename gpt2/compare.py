"""Draws the validation curves of runs over each other, over tokens, FLOPs and time.

python -m gpt2.compare runs/first runs/second [--reference=published.csv]
    [--output=compare.png]

A directory is that of a run, or of a sweep, whose arms are drawn. A reference has a line for each
point under the header `tokens,loss`; a column `name` tells several curves apart.
"""

from gpt2.ablate import compare

if __name__ == "__main__":
    compare.run()
