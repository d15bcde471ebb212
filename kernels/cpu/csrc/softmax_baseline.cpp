#include "softmax.h"

SOFTMAX_ENTRIES(baseline)
