#include "elementwise.h"

ELEMENTWISE_ENTRIES(fp32, avx512, Fp32Numbers)
ELEMENTWISE_ENTRIES(bf16, avx512, Bf16Numbers)
