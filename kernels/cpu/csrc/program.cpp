// A recorded step: calls made again in their order, without anybody in between. Recorded by kernels/cpu/program.py.

#include <stdint.h>

// Every entry that computes has this type; its arguments lie in a struct of its own.
struct RecordedCall {
    int32_t (*entry)(const void *arguments);
    const void *arguments;
};

// Not 0: a call failed, and those behind it were not made.
extern "C" int32_t octavo_run_program(const RecordedCall *calls, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (calls[i].entry(calls[i].arguments)) return 1;
    return 0;
}
