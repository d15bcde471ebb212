// The formats in which K and V are stored: `configs.kv` says how their numbers lie, `kernels.reference.kv_formats` what
// they mean. In the order of `configs.kv.KVFormat`.

#pragma once

#include <cstdint>

// Mirrored in kernels/cpu/store.py.
enum class KvFormat : int64_t { FP32, BF16, FP16, FP8_E4M3, FP8_E5M2, INT8, INT4 };

constexpr int INT4_GROUP = 32;  // dims with a scale and a zero point
