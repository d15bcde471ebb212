#include "linear_vector.h"

LINEAR_ENTRY(octavo_linear_fp32_avx512, Fp32)
LINEAR_ENTRY(octavo_linear_bf16_avx512, Bf16)
