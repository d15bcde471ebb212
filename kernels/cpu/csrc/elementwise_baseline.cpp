#include "elementwise.h"

ELEMENTWISE_ENTRIES(fp32, baseline, Fp32Numbers)
ELEMENTWISE_ENTRIES(bf16, baseline, Bf16Numbers)
