// Threads of the process's one OpenMP pool, without compiler support: every OpenMP runtime exports these entries, so a
// library built by g++ or clang runs on whichever runtime torch has loaded.

#pragma once

extern "C" {
void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags);
int omp_get_thread_num();
}

namespace {

// Runs body(thread) on `threads` threads, the caller's among them; returns when all have ended.
template <class Body>
void on_threads(int threads, Body &body) {
    if (threads <= 1) {
        body(0);
        return;
    }
    GOMP_parallel([](void *data) { (*static_cast<Body *>(data))(omp_get_thread_num()); }, &body, threads, 0);
}

}  // namespace
