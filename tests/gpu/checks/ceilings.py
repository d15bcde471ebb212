"""What this device can do at most."""

from gpu.bench import Bench, measure_ceilings


def run(bench: Bench) -> None:
    found = measure_ceilings(bench)
    bench.findings.figure("copy of device memory", f"{found['copy'] / 1e12:.2f} TB/s", copy=found["copy"])
    bench.findings.figure("bf16 matmul", f"{found['matmul'] / 1e12:.0f} TFLOP/s", matmul=found["matmul"])
