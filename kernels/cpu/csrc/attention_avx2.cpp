#include "attention_vector.h"

extern "C" int32_t octavo_attention_fp32_avx2(const AttentionCall *call) {
    return paged_attention<VectorEngine<Fp32>>(*call);
}
extern "C" int32_t octavo_attention_bf16_avx2(const AttentionCall *call) {
    return paged_attention<VectorEngine<Bf16>>(*call);
}
