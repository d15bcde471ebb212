#include "linear_vector.h"

LINEAR_ENTRY(octavo_linear_bf16_avx512bf16, Bf16, Bf16Numbers)
