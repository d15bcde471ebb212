// The process's threads for kernels: a team that never waits for somebody who is not there.
//
// A job is cut into parts; whoever is free claims the next one, the caller among them. On a busy machine a thread that
// the system does not run costs nothing: the others do its parts. (OpenMP's teams wait for every member at every barrier:
// with one core taken by somebody else, a step of 150 small jobs takes a second.) Who computes a part changes no bit.
//
// `turn` holds (generation of the job, its number of parts, the next part). A claim is a compare-and-swap on all three,
// so a thread that comes late never takes a part of a job that has ended: a job ends only when all its parts are done.

#include "parallel.h"

#include <pthread.h>
#include <sched.h>
#include <stdint.h>

namespace {

constexpr int MOST_WORKERS = 255, MOST_PARTS = 0xffff;
constexpr int SPINS = 2000;  // some 50 us, the pause between two jobs of a step; then a thread sleeps
constexpr int SPINS_BEFORE_YIELD = 2000;

struct Team {
    uint64_t turn = 0;
    Part part = nullptr;
    void *data = nullptr;
    int done = 0;
    bool busy = false;
    int threads = 1;  // how many may work on a job, the caller's among them
    int workers = 0;  // how many were started
    int sleeping = 0;
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
};

Team &team() {
    static Team *only = new Team;  // never destroyed: its threads outlive static destructors
    return *only;
}

void rest() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

template <class T>
T seen(const T &value) {
    return __atomic_load_n(&value, __ATOMIC_SEQ_CST);
}

uint32_t generation(uint64_t turn) { return turn >> 32; }

// Does parts of the current job until none is left.
void take_parts(Team &t) {
    uint64_t turn = seen(t.turn);
    for (;;) {
        const Part part = __atomic_load_n(&t.part, __ATOMIC_RELAXED);
        void *data = __atomic_load_n(&t.data, __ATOMIC_RELAXED);
        const int next = turn & 0xffff, parts = turn >> 16 & 0xffff;
        if (next >= parts) return;
        if (!__atomic_compare_exchange_n(&t.turn, &turn, turn + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) continue;
        part(data, next);
        __atomic_fetch_add(&t.done, 1, __ATOMIC_RELEASE);
        turn = seen(t.turn);
    }
}

void *work(void *) {
    Team &t = team();
    uint32_t last = 0;
    for (;;) {
        for (int i = 0; i < SPINS && generation(seen(t.turn)) == last; i++) rest();
        if (generation(seen(t.turn)) == last) {
            pthread_mutex_lock(&t.mutex);
            __atomic_fetch_add(&t.sleeping, 1, __ATOMIC_SEQ_CST);
            while (generation(seen(t.turn)) == last) pthread_cond_wait(&t.wake, &t.mutex);
            __atomic_fetch_sub(&t.sleeping, 1, __ATOMIC_SEQ_CST);
            pthread_mutex_unlock(&t.mutex);
        }
        last = generation(seen(t.turn));
        take_parts(t);
    }
}

// As many as a job of `parts` parts can use beside the caller. Called by the one who has the team.
void start_workers(Team &t, int parts) {
    for (; t.workers < parts - 1 && t.workers < MOST_WORKERS; t.workers++) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, work, nullptr)) return;  // fewer must do
        pthread_detach(thread);
    }
}

}  // namespace

extern "C" void octavo_set_threads(int64_t threads) { __atomic_store_n(&team().threads, threads, __ATOMIC_RELAXED); }

extern "C" int64_t octavo_threads() { return __atomic_load_n(&team().threads, __ATOMIC_RELAXED); }

extern "C" void octavo_run_parts(Part part, void *data, int parts) {
    Team &t = team();
    const bool alone = parts <= 1 || parts > MOST_PARTS;
    if (alone || __atomic_exchange_n(&t.busy, true, __ATOMIC_ACQUIRE)) {  // busy: with another caller's job
        for (int i = 0; i < parts; i++) part(data, i);
        return;
    }
    start_workers(t, parts);
    __atomic_store_n(&t.part, part, __ATOMIC_RELAXED);
    __atomic_store_n(&t.data, data, __ATOMIC_RELAXED);
    __atomic_store_n(&t.done, 0, __ATOMIC_RELAXED);
    const uint64_t next = static_cast<uint64_t>(generation(t.turn) + 1) << 32 | static_cast<uint64_t>(parts) << 16;
    __atomic_store_n(&t.turn, next, __ATOMIC_SEQ_CST);
    if (seen(t.sleeping)) {
        pthread_mutex_lock(&t.mutex);
        pthread_cond_broadcast(&t.wake);
        pthread_mutex_unlock(&t.mutex);
    }
    take_parts(t);
    for (int i = 0; __atomic_load_n(&t.done, __ATOMIC_ACQUIRE) != parts; i++) i < SPINS_BEFORE_YIELD ? rest() : (void)sched_yield();
    __atomic_store_n(&t.busy, false, __ATOMIC_RELEASE);
}
