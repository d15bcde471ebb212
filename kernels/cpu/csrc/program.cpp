// A recorded step: its calls made one after another, without anybody in between. Recorded by kernels/cpu/program.py.

#include <stdint.h>

// Every entry that computes has this type; its arguments lie in a struct of its own.
struct RecordedCall {
    int32_t (*entry)(const void *arguments);
    const void *arguments;
};

// A number of rows in some call's arguments that is another one in each run.
struct RecordedSize {
    int64_t *place;
    int64_t which;
};

// `sizes`: those of this run. Not 0: a call failed, and those behind it were not made.
extern "C" int32_t octavo_run_program(const RecordedCall *calls, int64_t num_calls, const RecordedSize *places,
                                      int64_t num_places, const int64_t *sizes) {
    for (int64_t i = 0; i < num_places; i++) *places[i].place = sizes[places[i].which];
    for (int64_t i = 0; i < num_calls; i++)
        if (calls[i].entry(calls[i].arguments)) return 1;
    return 0;
}
