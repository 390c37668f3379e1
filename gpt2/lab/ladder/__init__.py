"""A ladder of model sizes: does a change help a large model as much as a small model?"""
