"""Draws the validation curves of runs over each other: gpt2/ablate/compare.py.

python -m gpt2.compare runs/first runs/second [--reference=published.csv] [--output=compare.png]
"""

from gpt2.ablate import compare

if __name__ == "__main__":
    compare.run()
