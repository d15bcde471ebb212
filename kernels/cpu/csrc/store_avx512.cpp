#include "store.h"

STORE_ENTRIES(avx512)
