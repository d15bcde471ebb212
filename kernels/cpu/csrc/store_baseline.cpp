#include "store.h"

STORE_ENTRIES(baseline)
