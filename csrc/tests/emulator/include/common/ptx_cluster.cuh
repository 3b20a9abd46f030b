// The functions of csrc/common/ptx_cluster.cuh: the emulated GPU has no clusters, and no kernel may come here.
#pragma once

#include "common/ptx.cuh"

namespace mamba {

inline void arrive_at_cluster() {
    emulator::fail("a cluster, which the emulator does not know");
}
inline void wait_for_cluster() {
    arrive_at_cluster();
}
inline void make_cluster_barrier(uint64_t*) {
    arrive_at_cluster();
}
inline void expect_from_cluster(uint64_t*, uint32_t) {
    arrive_at_cluster();
}
inline void send_to_cluster(float*, uint64_t*, uint32_t, float) {
    arrive_at_cluster();
}
inline void wait_for_sent(uint64_t*) {
    arrive_at_cluster();
}

}  // namespace mamba
