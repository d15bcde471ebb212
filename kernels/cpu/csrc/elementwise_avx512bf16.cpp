#include "elementwise.h"

ELEMENTWISE_ENTRIES(bf16, avx512bf16, Bf16Numbers)
