"""A ladder of sizes: is what helps a small model worth as much to a larger one?"""
