#include "linear_vector.h"

LINEAR_ENTRY(octavo_linear_fp32_avx512, Fp32, Fp32Numbers)
LINEAR_ENTRY(octavo_linear_bf16_avx512, Bf16, Bf16Numbers)
