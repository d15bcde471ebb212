#include "linear_vector.h"

LINEAR_ENTRY(octavo_linear_fp32_baseline, Fp32, Fp32Numbers)
LINEAR_ENTRY(octavo_linear_bf16_baseline, Bf16, Bf16Numbers)
