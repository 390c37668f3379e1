"""The lab: programs that compare, plan and measure runs. No code outside of the lab imports it."""
