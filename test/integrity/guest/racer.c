// racer lets many actors write and read the same pages at the same time, each
// by another route: stores and atomic adds of threads, stores of a second
// process, process_vm_writev, ptrace, /proc/PID/mem, read(2), recv(2) and
// pread(2) into the page, pwrite(2) to the file behind it, a futex operation
// of the kernel. Every actor owns one lane of eight bytes in every page.
//
// Before a write the actor publishes the number it is about to write (issued),
// afterwards that it is written (done). A reader takes done, then the lane,
// then issued: what it saw must lie between the two. A lost write, a stale
// page, a resurrected one and a torn one all break that.
//
//   racer --seconds=20 --pages=2048

#include "guest.h"

#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>

enum lane {
  L_STORE,    // a thread's stores
  L_ADD,      // atomic adds of two threads
  L_VMWRITE,  // process_vm_writev from another process
  L_PROCMEM,  // pwrite to /proc/PID/mem from another process
  L_PTRACE,   // POKEDATA
  L_READ,     // read(2) from a pipe
  L_RECV,     // recv(2) from a socket
  L_PREAD,    // pread(2) from a file
  L_OTHER,    // stores of another process (shared area only)
  L_PWRITE,   // pwrite(2) to the file (shared area only)
  L_FUTEX,    // FUTEX_WAKE_OP
  NLANES
};
static const char *const lane_names[] = {"store",  "atomic add", "process_vm_writev", "/proc/pid/mem",
                                         "ptrace", "read",       "recv",              "pread",
                                         "other process", "pwrite", "futex op"};

enum { PRIVATE_AREA, SHARED_AREA, NAREAS };
static const char *const area_names[] = {"private", "shared"};

#define WINDOW 128  // bytes of a page that hold its lanes
#define FOCUS 24    // pages that everybody likes

struct control {
  atomic_int stop;
  atomic_llong quiet_until;
  atomic_int victim;  // the thread that gets traced
  atomic_ulong reads[NAREAS][NLANES], writes[NAREAS][NLANES];
  atomic_int unsupported[NLANES];
};

static struct control *ctl;
static atomic_uint *issued_tab, *done_tab;  // [area][lane][page]
static uint8_t *area[NAREAS];
static size_t pages;
static int shared_fd;
static pid_t main_pid;
static struct region bg[NAREAS];  // what the rest of each page holds

static size_t tab(int a, int l, size_t p) { return ((size_t)a * NLANES + l) * pages + p; }
#define issued(a, l, p) (&issued_tab[tab(a, l, p)])
#define done(a, l, p) (&done_tab[tab(a, l, p)])

static size_t lane_off(size_t p, int l) { return mix(p) % (PAGE / WINDOW) * WINDOW + l * 8; }
static uint8_t *lane_addr(int a, size_t p, int l) { return area[a] + p * PAGE + lane_off(p, l); }

static int counts(int l) { return l == L_ADD || l == L_FUTEX; }

// encode makes a lane's value; its upper half proves that it belongs there.
static uint64_t encode(int a, int l, size_t p, uint32_t seq) {
  if (seq == 0) return 0;
  if (counts(l)) return seq;
  return seq | mix(((uint64_t)seq << 24) ^ (p << 6) ^ (l << 1) ^ a) << 32;
}

static uint32_t decode(int a, int l, size_t p, uint64_t v, const char *how) {
  uint32_t seq = v;
  if (v != encode(a, l, p, seq))
    fail("%s area page %zu lane %s by %s: %016llx is no value of this lane (seq would be %u)",
         area_names[a], p, lane_names[l], how, (unsigned long long)v, seq);
  return seq;
}

// between is the invariant. d was taken before the read, i after it.
static void between(int a, int l, size_t p, uint64_t v, uint32_t d, uint32_t i, const char *how) {
  uint32_t seq = decode(a, l, p, v, how);
  if (seq < d)
    fail("%s area page %zu lane %s by %s: read %u after %u was written: a stale read or a lost write",
         area_names[a], p, lane_names[l], how, seq, d);
  if (seq > i)
    fail("%s area page %zu lane %s by %s: read %u but only %u were ever issued", area_names[a], p,
         lane_names[l], how, seq, i);
  atomic_fetch_add(&ctl->reads[a][l], 1);
}

static size_t pick_page(struct rng *g) {
  return below(g, 2) ? mix(below(g, FOCUS)) % pages : below(g, pages);
}

static int pick_lane(struct rng *g, int a) {
  int l;
  do l = below(g, NLANES);
  while (a == PRIVATE_AREA && (l == L_OTHER || l == L_PWRITE));
  return l;
}

// pace keeps the accesses sparse enough for pages to go cold, and makes all
// actors wait for the end of a quiet time and then jump at the same pages.
static void pace(struct rng *g) {
  int64_t q = atomic_load(&ctl->quiet_until), t = now_ns();
  if (t < q) {
    sleep_ms((q - t) / 1000000 + 1);
    return;
  }
  if (below(g, 10) == 0) sleep_ms(1 + below(g, 40));
}

static int running(void) {
  if (atomic_load_explicit(&ctl->stop, memory_order_relaxed)) return 0;
  return 1;
}

// begin and finish bracket a write of one lane; begin returns the new number.
static uint32_t begin(int a, int l, size_t p) { return atomic_fetch_add(issued(a, l, p), 1) + 1; }
static void finish(int a, int l, size_t p) {
  atomic_fetch_add(done(a, l, p), 1);
  atomic_fetch_add(&ctl->writes[a][l], 1);
}

// own is the writer's check before it writes: its last value is still there.
static void own(int a, int l, size_t p, uint64_t v, const char *how) {
  uint32_t want = atomic_load(done(a, l, p)), seq = decode(a, l, p, v, how);
  if (seq != want)
    fail("%s area page %zu lane %s by %s: its only writer wrote %u and finds %u", area_names[a], p,
         lane_names[l], how, want, seq);
}

static uint64_t load(int a, int l, size_t p) {
  return atomic_load((atomic_ullong *)lane_addr(a, p, l));
}

// ---- writers of the main process ---------------------------------------------

static void *w_store(void *arg) {
  struct rng g = {(uintptr_t)arg};
  while (running()) {
    int a = below(&g, 2);
    size_t p = pick_page(&g);
    own(a, L_STORE, p, load(a, L_STORE, p), "load");
    uint64_t v = encode(a, L_STORE, p, begin(a, L_STORE, p));
    atomic_store((atomic_ullong *)lane_addr(a, p, L_STORE), v);
    finish(a, L_STORE, p);
    pace(&g);
  }
  return NULL;
}

static void *w_add(void *arg) {
  struct rng g = {(uintptr_t)arg};
  while (running()) {
    int a = below(&g, 2);
    size_t p = pick_page(&g);
    begin(a, L_ADD, p);
    atomic_fetch_add((atomic_ullong *)lane_addr(a, p, L_ADD), 1);
    finish(a, L_ADD, p);
    pace(&g);
  }
  return NULL;
}

static void *w_futex(void *arg) {
  struct rng g = {(uintptr_t)arg};
  atomic_int dummy = 0;
  while (running()) {
    int a = below(&g, 2);
    size_t p = pick_page(&g);
    own(a, L_FUTEX, p, load(a, L_FUTEX, p), "load");
    begin(a, L_FUTEX, p);
    long r = syscall(SYS_futex, &dummy, FUTEX_WAKE_OP, 1, 1L, lane_addr(a, p, L_FUTEX),
                     FUTEX_OP(FUTEX_OP_ADD, 1, FUTEX_OP_CMP_EQ, 0x7ff));
    must(r >= 0, "FUTEX_WAKE_OP");
    finish(a, L_FUTEX, p);
    pace(&g);
  }
  return NULL;
}

// w_copyin has the kernel write the lane: from a pipe, a socket or a file.
static void *w_copyin(void *arg) {
  struct rng g = {(uintptr_t)arg & ~15UL};
  int l = (uintptr_t)arg & 15, fd[2] = {-1, -1};
  if (l == L_READ) must(pipe(fd) == 0, "pipe");
  if (l == L_RECV) must(socketpair(AF_UNIX, SOCK_STREAM, 0, fd) == 0, "socketpair");
  if (l == L_PREAD) {
    fd[0] = fd[1] = syscall(SYS_memfd_create, "lane", 0);
    must(fd[0] >= 0, "memfd_create");
  }
  while (running()) {
    int a = below(&g, 2);
    size_t p = pick_page(&g);
    own(a, l, p, load(a, l, p), "load");
    uint64_t v = encode(a, l, p, begin(a, l, p));
    uint8_t *to = lane_addr(a, p, l);
    if (l == L_PREAD) {
      off_t o = below(&g, 64) * 8;
      must(pwrite(fd[1], &v, 8, o) == 8, "pwrite");
      must(pread(fd[0], to, 8, o) == 8, "pread");
    } else {
      must(write(fd[1], &v, 8) == 8, "write");
      must((l == L_READ ? read(fd[0], to, 8) : recv(fd[0], to, 8, MSG_WAITALL)) == 8, lane_names[l]);
    }
    finish(a, l, p);
    pace(&g);
  }
  return NULL;
}

// ---- readers of the main process ---------------------------------------------

static void *r_main(void *arg) {
  struct rng g = {(uintptr_t)arg};
  int p2[2], mem = open("/proc/self/mem", O_RDONLY);
  uint8_t *copy = map_or_die(1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  must(mem >= 0 && pipe(p2) == 0, "pipe");
  while (running()) {
    int a = below(&g, 2), how = below(&g, 5);
    size_t p = pick_page(&g);
    int l = pick_lane(&g, a);
    uint32_t d = atomic_load(done(a, l, p));
    uint64_t v;
    static const char *const names[] = {"load", "write to pipe", "/proc/self/mem", "file pread",
                                        "whole page"};
    switch (how) {
      case 0:
        v = load(a, l, p);
        break;
      case 1:
        must(write(p2[1], lane_addr(a, p, l), 8) == 8 && read(p2[0], &v, 8) == 8, "pipe");
        break;
      case 2:
        must(pread(mem, &v, 8, (uintptr_t)lane_addr(a, p, l)) == 8, "/proc/self/mem");
        break;
      case 3:
        if (a != SHARED_AREA) continue;
        must(pread(shared_fd, &v, 8, p * PAGE + lane_off(p, l)) == 8, "pread");
        break;
      default: {
        // The bytes that nobody writes have to stay as they are.
        memcpy(copy, area[a] + p * PAGE, PAGE);
        memcpy(&v, copy + lane_off(p, l), 8);
        uint8_t want[PAGE];
        page_content(want, &bg[a].pg[p]);
        size_t o = lane_off(p, 0);
        memcpy(want + o, copy + o, WINDOW);
        if (memcmp(want, copy, PAGE)) page_check(copy, &bg[a].pg[p], area_names[a], p, "load, outside the lanes");
        break;
      }
    }
    between(a, l, p, v, d, atomic_load(issued(a, l, p)), names[how]);
    pace(&g);
  }
  return NULL;
}

// ---- fork: a child's copy is frozen at the fork --------------------------------

static void *forker(void *arg) {
  struct rng g = {(uintptr_t)arg};
  static uint32_t before[FOCUS][NLANES];
  static uint64_t seen[FOCUS][NLANES];
  const int a = PRIVATE_AREA;
  while (running()) {
    for (int k = 0; k < FOCUS; k++)
      for (int l = 0; l < NLANES; l++) before[k][l] = atomic_load(done(a, l, mix(k) % pages));
    pid_t pid = fork();
    must(pid >= 0, "fork");
    if (pid == 0) {
      for (int k = 0; k < FOCUS; k++)
        for (int l = 0; l < NLANES; l++) {
          if (l == L_OTHER || l == L_PWRITE) continue;
          size_t p = mix(k) % pages;
          seen[k][l] = load(a, l, p);
          between(a, l, p, seen[k][l], before[k][l], atomic_load(issued(a, l, p)), "load in a forked child");
        }
      sleep_ms(below(&g, 400));
      for (int k = 0; k < FOCUS; k++)
        for (int l = 0; l < NLANES; l++) {
          if (l == L_OTHER || l == L_PWRITE) continue;
          size_t p = mix(k) % pages;
          if (load(a, l, p) != seen[k][l])
            fail("private page %zu lane %s: a forked child sees a later write of its parent", p, lane_names[l]);
        }
      // What the child writes must not show in the parent.
      for (int k = 0; k < FOCUS; k++) memset(area[a] + mix(k) % pages * PAGE, 0xee, PAGE);
      _exit(0);
    }
    int st;
    must(waitpid(pid, &st, 0) == pid, "waitpid");
    if (st) fail("a forked child ended with status %#x", st);
    sleep_ms(300 + below(&g, 700));
    pace(&g);
  }
  return NULL;
}

static void *victim(void *arg) {
  (void)arg;
  atomic_store(&ctl->victim, (int)syscall(SYS_gettid));
  // Long sleeps, which the tracer interrupts: short ones would keep the sandbox
  // from ever being idle.
  while (running()) sleep_ms(1000);
  return NULL;
}

// ---- the other process -----------------------------------------------------------

static int vm_copy(int a, int l, size_t p, uint64_t *v, int write) {
  struct iovec lo = {v, 8}, re = {lane_addr(a, p, l), 8};
  ssize_t r = write ? process_vm_writev(main_pid, &lo, 1, &re, 1, 0)
                    : process_vm_readv(main_pid, &lo, 1, &re, 1, 0);
  return r == 8 ? 0 : -1;
}

static int other_mem = -1;

static void other_write(struct rng *g, int l) {
  int a = l == L_OTHER || l == L_PWRITE ? SHARED_AREA : below(g, 2);
  size_t p = pick_page(g);
  uint64_t v;
  if (atomic_load(&ctl->unsupported[l])) return;
  // The writer's own check goes the same way as its write.
  switch (l) {
    case L_VMWRITE:
      must(vm_copy(a, l, p, &v, 0) == 0, "process_vm_readv");
      break;
    case L_PROCMEM:
      must(pread(other_mem, &v, 8, (uintptr_t)lane_addr(a, p, l)) == 8, "/proc/pid/mem read");
      break;
    case L_PWRITE:
      must(pread(shared_fd, &v, 8, p * PAGE + lane_off(p, l)) == 8, "pread");
      break;
    default:
      v = load(a, l, p);
  }
  own(a, l, p, v, lane_names[l]);
  v = encode(a, l, p, begin(a, l, p));
  switch (l) {
    case L_VMWRITE:
      must(vm_copy(a, l, p, &v, 1) == 0, "process_vm_writev");
      break;
    case L_PROCMEM:
      if (pwrite(other_mem, &v, 8, (uintptr_t)lane_addr(a, p, l)) != 8) {
        // Some kernels have a read-only /proc/PID/mem.
        atomic_store(&ctl->unsupported[l], 1);
        atomic_fetch_sub(issued(a, l, p), 1);
        return;
      }
      break;
    case L_PWRITE:
      must(pwrite(shared_fd, &v, 8, p * PAGE + lane_off(p, l)) == 8, "pwrite");
      break;
    default:
      atomic_store((atomic_ullong *)lane_addr(a, p, l), v);
  }
  finish(a, l, p);
}

static void other_read(struct rng *g) {
  int a = below(g, 2), how = below(g, 3);
  size_t p = pick_page(g);
  int l = pick_lane(g, a);
  if (a == PRIVATE_AREA && how == 2) how = 0;  // its own copy of that area is none of the race
  uint32_t d = atomic_load(done(a, l, p));
  uint64_t v;
  static const char *const names[] = {"process_vm_readv", "/proc/pid/mem", "load in another process"};
  if (how == 0)
    must(vm_copy(a, l, p, &v, 0) == 0, "process_vm_readv");
  else if (how == 1)
    must(pread(other_mem, &v, 8, (uintptr_t)lane_addr(a, p, l)) == 8, "/proc/pid/mem read");
  else
    v = load(a, l, p);
  between(a, l, p, v, d, atomic_load(issued(a, l, p)), names[how]);
}

static void *other_main(void *arg) {
  struct rng g = {(uintptr_t)arg & ~15UL};
  int l = (uintptr_t)arg & 15;
  while (running()) {
    if (l < NLANES)
      other_write(&g, l);
    else
      other_read(&g);
    pace(&g);
  }
  return NULL;
}

static void other_process(uint64_t seed) {
  prog_name = "racer (other process)";
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/mem", main_pid);
  other_mem = open(path, O_RDWR);
  if (other_mem < 0) {
    atomic_store(&ctl->unsupported[L_PROCMEM], 1);
    other_mem = open(path, O_RDONLY);
  }
  must(other_mem >= 0, path);
  static const int lanes[] = {L_VMWRITE, L_PROCMEM, L_OTHER, L_PWRITE, 15};
  pthread_t th[5];
  for (int i = 0; i < 5; i++)
    if (pthread_create(&th[i], NULL, other_main, (void *)((mix(seed + i) & ~15UL) | lanes[i])))
      fail("pthread_create");
  for (int i = 0; i < 5; i++) pthread_join(th[i], NULL);
  _exit(0);
}

// ---- the tracer ------------------------------------------------------------------

static void tracer_process(uint64_t seed) {
  prog_name = "racer (tracer)";
  struct rng g = {seed};
  int tid;
  while (!(tid = atomic_load(&ctl->victim))) sleep_ms(1);
  if (ptrace(PTRACE_SEIZE, tid, NULL, NULL) != 0) {
    atomic_store(&ctl->unsupported[L_PTRACE], 1);
    _exit(0);
  }
  while (running()) {
    int st;
    must(ptrace(PTRACE_INTERRUPT, tid, NULL, NULL) == 0, "PTRACE_INTERRUPT");
    must(waitpid(tid, &st, __WALL) == tid, "waitpid for a stop");
    if (!WIFSTOPPED(st)) fail("the traced thread ended with status %#x", st);
    for (int k = 1 + below(&g, 30); k-- && running();) {
      int a = below(&g, 2), l = below(&g, 2) ? (int)L_PTRACE : pick_lane(&g, a);
      size_t p = pick_page(&g);
      uint32_t d = atomic_load(done(a, l, p));
      errno = 0;
      uint64_t v = ptrace(PTRACE_PEEKDATA, tid, lane_addr(a, p, l), NULL);
      must(errno == 0, "PTRACE_PEEKDATA");
      between(a, l, p, v, d, atomic_load(issued(a, l, p)), "PEEKDATA");
      if (l == L_PTRACE) {
        own(a, l, p, v, "PEEKDATA");
        v = encode(a, l, p, begin(a, l, p));
        must(ptrace(PTRACE_POKEDATA, tid, lane_addr(a, p, l), v) == 0, "PTRACE_POKEDATA");
        finish(a, l, p);
      }
      pace(&g);
    }
    must(ptrace(PTRACE_CONT, tid, NULL, NULL) == 0, "PTRACE_CONT");
    sleep_ms(1 + below(&g, 60));
  }
  _exit(0);
}

int main(int argc, char **argv) {
  prog_name = "racer";
  long seconds = opt_num(argc, argv, "seconds", 20);
  uint64_t seed = opt_num(argc, argv, "seed", 1);
  pages = opt_num(argc, argv, "pages", 2048);
  main_pid = getpid();
  install_fault_handlers();
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);

  const int rw = PROT_READ | PROT_WRITE, sh = MAP_SHARED | MAP_ANONYMOUS;
  ctl = map_or_die((sizeof *ctl + PAGE - 1) / PAGE, rw, sh, -1);
  size_t n = (NAREAS * NLANES * pages * sizeof(atomic_uint) + PAGE - 1) / PAGE;
  issued_tab = map_or_die(n, rw, sh, -1);
  done_tab = map_or_die(n, rw, sh, -1);
  for (int a = 0; a < NAREAS; a++) {
    region_new(&bg[a], a == PRIVATE_AREA ? R_PRIVATE : R_MEMFD, pages, mix(seed + a), "/dev/shm");
    area[a] = bg[a].base;
    for (size_t i = 0; i < pages; i++) {
      page_write(&bg[a], i);
      memset(area[a] + i * PAGE + lane_off(i, 0), 0, WINDOW);
    }
  }
  shared_fd = bg[SHARED_AREA].fd;

  pid_t kids[2];
  for (int i = 0; i < 2; i++) {
    kids[i] = fork();
    must(kids[i] >= 0, "fork");
    if (kids[i] == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
      (i ? tracer_process : other_process)(mix(seed + 100 + i));
    }
  }
  static const struct {
    void *(*f)(void *);
    int low;
  } plan[] = {{w_store, 0},       {w_add, 0},   {w_add, 0},  {w_futex, 0}, {w_copyin, L_READ},
              {w_copyin, L_RECV}, {w_copyin, L_PREAD}, {r_main, 0}, {r_main, 0}, {forker, 0}, {victim, 0}};
  enum { NTH = sizeof plan / sizeof plan[0] };
  pthread_t th[NTH];
  for (int i = 0; i < NTH; i++)
    if (pthread_create(&th[i], NULL, plan[i].f, (void *)((mix(seed + 200 + i) & ~15UL) | plan[i].low)))
      fail("pthread_create");

  int64_t end = now_ns() + seconds * 1000000000LL;
  struct rng g = {seed};
  while (now_ns() < end) {
    // Busy times, with quiet ones in between that are long enough for a pass on
    // a loaded machine.
    sleep_ms(300 + below(&g, 1000));
    if (below(&g, 6)) {
      int64_t ms = 500 + (int64_t)below(&g, 1000);
      atomic_store(&ctl->quiet_until, now_ns() + ms * 1000000);
      sleep_ms(ms);
    }
    // A child that failed has printed why.
    int st;
    pid_t p = waitpid(-1, &st, WNOHANG | __WNOTHREAD);
    if (p > 0 && st) fail("process %d ended with status %#x", p, st);
    if (p > 0 && p == kids[1]) kids[1] = 0;
  }
  atomic_store(&ctl->stop, 1);
  for (int i = 0; i < 2; i++) {
    int st;
    if (!kids[i]) continue;
    must(waitpid(kids[i], &st, 0) == kids[i], "waitpid");
    if (st) fail("process %d ended with status %#x", kids[i], st);
  }
  for (int i = 0; i < NTH; i++) pthread_join(th[i], NULL);

  // At rest, every lane of every page holds exactly what was written last.
  char line[1200], refused[200];
  size_t k = 0, u = 0;
  refused[0] = 0;
  for (int l = 0; l < NLANES; l++) {
    unsigned long w = 0, r = 0;
    for (int a = 0; a < NAREAS; a++) {
      w += atomic_load(&ctl->writes[a][l]);
      r += atomic_load(&ctl->reads[a][l]);
      for (size_t p = 0; p < pages; p++)
        own(a, l, p, load(a, l, p), "load at the end");
    }
    k += snprintf(line + k, sizeof line - k, " %s=%lu/%lu", lane_names[l], w, r);
    if (atomic_load(&ctl->unsupported[l])) u += snprintf(refused + u, sizeof refused - u, "%s%s", u ? "," : "", lane_names[l]);
  }
  printf("OK racer seed=%llu unsupported=%s; writes/reads:%s\n", (unsigned long long)seed,
         u ? refused : "none", line);
  return 0;
}
