"""What a run tells about itself: metrics, progress, speed, compilations, curves and traces.

Nothing heavy is imported here: matplotlib, tensorboardX, wandb and rich load when first used.
"""
