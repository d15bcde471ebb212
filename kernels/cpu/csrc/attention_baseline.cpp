#include "attention_vector.h"

extern "C" int32_t octavo_attention_fp32_baseline(const AttentionCall *call) {
    return paged_attention<VectorEngine<Fp32>>(*call);
}
extern "C" int32_t octavo_attention_bf16_baseline(const AttentionCall *call) {
    return paged_attention<VectorEngine<Bf16>>(*call);
}
