#include "elementwise.h"

ELEMENTWISE_ENTRIES(fp32, avx2, Fp32Numbers)
ELEMENTWISE_ENTRIES(bf16, avx2, Bf16Numbers)
