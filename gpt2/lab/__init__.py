"""The lab: programs that compare, plan and measure runs. No code outside of it imports it."""
