#include "softmax.h"

SOFTMAX_ENTRIES(avx2)
