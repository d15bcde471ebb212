// Threads of the process's one OpenMP pool, without compiler support: every OpenMP runtime exports these entries, so a
// library built by g++ or clang runs on whichever runtime torch has loaded.

#pragma once

extern "C" {
void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags);
int omp_get_thread_num();
int omp_get_num_threads();
}

namespace {

// Runs body(0) … body(threads - 1), each on a thread of its own as far as the runtime grants that many (it may not: a thread
// limit, a caller that is itself in a team); returns when all have ended. Bodies must not wait for each other.
template <class Body>
void on_threads(int threads, Body &body) {
    if (threads <= 1) {
        body(0);
        return;
    }
    struct Team {
        Body &body;
        int threads;
    } team{body, threads};
    auto run = [](void *data) {
        const Team &team = *static_cast<Team *>(data);
        for (int i = omp_get_thread_num(); i < team.threads; i += omp_get_num_threads()) team.body(i);
    };
    GOMP_parallel(run, &team, threads, 0);
}

}  // namespace
