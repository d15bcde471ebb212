"""Scheduling and KV bookkeeping: pure logic, no torch."""
