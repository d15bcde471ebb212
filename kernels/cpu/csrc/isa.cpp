// What this CPU and its operating system can run. Own cpuid: compilers' helpers know AMX only in recent versions, and
// neither they nor cpuid alone say whether the system saves the wide registers (XCR0).

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__x86_64__)
constexpr uint64_t AVX_STATE = 0x6, AVX512_STATE = 0xe6, AMX_STATE = 0x60000;

uint64_t saved_state() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
}

bool bit(uint32_t word, int index) { return word >> index & 1; }
#endif

}  // namespace

enum Isa { AVX2 = 1, AVX512 = 2, AVX512_BF16 = 4, AMX = 8 };

// Bits of Isa that may be used here. Asks Linux for the AMX tile registers, which a process gets on request only.
extern "C" int32_t octavo_cpu_isas() {
    int32_t isas = 0;
#if defined(__x86_64__)
    uint32_t a, b, c, d, b7, d7, a71;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27)) return 0;  // no OSXSAVE: xgetbv would fault
    const bool fma = bit(c, 12), avx = bit(c, 28), f16c = bit(c, 29);
    const uint64_t state = saved_state();
    if (!avx || (state & AVX_STATE) != AVX_STATE || !__get_cpuid_count(7, 0, &a, &b7, &c, &d7)) return 0;
    if (fma && f16c && bit(b7, 5)) isas |= AVX2;
    if (!(isas & AVX2) || (state & AVX512_STATE) != AVX512_STATE) return isas;
    if (!bit(b7, 16) || !bit(b7, 17) || !bit(b7, 30) || !bit(b7, 31)) return isas;  // F, DQ, BW, VL
    isas |= AVX512;
    if (!__get_cpuid_count(7, 1, &a71, &b, &c, &d) || !bit(a71, 5)) return isas;
    isas |= AVX512_BF16;
    constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    if (bit(d7, 22) && bit(d7, 24) && (state & AMX_STATE) == AMX_STATE &&
        syscall(SYS_arch_prctl, request_permission, tile_data) == 0)
        isas |= AMX;
#endif
    return isas;
}
