#include "attention_vector.h"

extern "C" int32_t octavo_attention_bf16_avx512bf16(const AttentionCall *call) {
    return paged_attention<VectorEngine<Bf16>>(*call);
}
