// hazard aims at one thing: an application that goes on seeing the template's
// copy of a page after the page was written to, or that loses what was written
// because of it. It runs as init and is checkpointed after READY; in a clone
// every page of its slots is the template's.
//
//   hazard --seed=1 --slots=512
//
// Requests: "list" names the scenarios, "run NAME N" runs one N times, each time
// on a slot of its own, "reset" writes what the template has back to all slots
// that were used, so that the next eviction makes them template pages again,
// "verify" looks at all slots that were not used since, "quit".
//
// In a scenario a spinner reads one word of the slot's page without pause, so
// the page is mapped from the template, and the scenario writes to the page by
// one route or another. Before a write it publishes the value that it is about
// to write (issued), afterwards that it is written (done). What the spinner sees
// lies between the two, whatever it was before it started to read.

#include "guest.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <spawn.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statfs.h>
#include <sys/sysinfo.h>
#include <sys/time.h>
#include <sys/utsname.h>

#define SLOT 32  // pages: two map units, so that every slot has copy-ups of its own
#define RW (PROT_READ | PROT_WRITE)
#define ANON (MAP_PRIVATE | MAP_ANONYMOUS)

static uint8_t *area;
static size_t slots, next_slot;
static uint8_t *dirty;  // by slot: 1 written to, 2 also mapped anew
static uint64_t seed;

// ---- what the template has -----------------------------------------------------

// The slots differ in how well they compress: some are stored, should they be
// evicted when they differ, and some stay as they are.
static void original(uint8_t *out, size_t slot, size_t page) {
  uint64_t h = mix(seed ^ (slot << 20) ^ page);
  switch (slot % 4) {
    case 0:
      gen_random(out, PAGE, h);
      break;
    case 1:
      gen_text(out, PAGE, h);
      break;
    default:
      gen_words(out, PAGE, h);
  }
  memcpy(out, &h, 8);
}

static uint8_t *slot_page(size_t slot, size_t page) { return area + (slot * SLOT + page) * PAGE; }

// check_page compares a page with what the template has, but for a part.
static void check_page(const uint8_t *p, size_t slot, size_t page, size_t skip_off, size_t skip_len, const char *how) {
  uint8_t want[PAGE], got[PAGE];
  original(want, slot, page);
  memcpy(got, p, PAGE);
  memcpy(want + skip_off, got + skip_off, skip_len);
  if (!memcmp(want, got, PAGE)) return;
  size_t i = 0, n = 0;
  for (size_t k = 0; k < PAGE; k++)
    if (want[k] != got[k]) {
      if (!n++) i = k;
    }
  fail("slot %zu page %zu: %s: %zu bytes differ from %zu on: want %02x got %02x%s", slot, page, how, n, i, want[i], got[i],
       all_zero(got, PAGE) ? " (all zeros)" : "");
}

static void check_slot(size_t slot, const char *how) {
  for (size_t k = 0; k < SLOT; k++) check_page(slot_page(slot, k), slot, k, 0, 0, how);
}

// ---- one run of a scenario -------------------------------------------------------

struct run {
  struct rng g;
  size_t slot;
  size_t page;   // the one that is written to
  uint8_t *p;    // its address
  size_t off;    // of the word in it that is watched
  const char *name;
};

// take gives a run a slot that is all template as far as this program knows.
static void take(struct run *r) {
  for (size_t i = 0; i < slots && dirty[next_slot]; i++) next_slot = (next_slot + 1) % slots;
  if (dirty[next_slot]) fail("no slots are left, reset");
  r->slot = next_slot;
  next_slot = (next_slot + 1) % slots;
  dirty[r->slot] = 1;
  r->page = below(&r->g, SLOT);
  r->p = slot_page(r->slot, r->page);
  r->off = (1 + below(&r->g, 510)) * 8;
  if (below(&r->g, 4) == 0) r->off = 8;
  if (below(&r->g, 4) == 0) r->off = PAGE - 8;
}

static _Atomic uint64_t *word(struct run *r) { return (_Atomic uint64_t *)(r->p + r->off); }

// rest checks the page but for the watched word, and its neighbours.
static void rest(struct run *r, size_t len, const char *how) {
  for (size_t k = 0; k < SLOT; k++)
    check_page(r->p + (k - r->page) * PAGE, r->slot, k, k == r->page ? r->off : 0, k == r->page ? len : 0, how);
}

// ---- the spinner -------------------------------------------------------------------

#define NVALS 64
static struct {
  _Atomic(_Atomic uint64_t *) at;
  uint64_t vals[NVALS];
  atomic_int issued, done, stop_seen;
  atomic_uint turn;  // a futex: changes when there is something else to do
  atomic_ulong reads;
  const char *name;
} watch;

static void observe(int d, uint64_t v, int i, const char *who) {
  for (int k = i; k >= 0; k--)
    if (watch.vals[k] == v) {
      if (k < d)
        fail("%s: %s read value %d (%016llx) after value %d was written: a stale read", watch.name, who, k,
             (unsigned long long)v, d);
      return;
    }
  for (int k = i + 1; k < NVALS && watch.vals[k]; k++)
    if (watch.vals[k] == v) fail("%s: %s read value %d before it was written (%d issued)", watch.name, who, k, i);
  fail("%s: %s read %016llx, which nobody wrote; %d issued, %d done, last %016llx", watch.name, who, (unsigned long long)v, i,
       d, (unsigned long long)watch.vals[i]);
}

static void *spinner(void *arg) {
  const char *who = arg;
  for (;;) {
    unsigned turn = atomic_load(&watch.turn);
    _Atomic uint64_t *at = atomic_load(&watch.at);
    if (!at) {
      // Blocks: with nothing going on, the sandbox is to be idle.
      atomic_fetch_or(&watch.stop_seen, who[0] == 'a' ? 1 : 2);
      syscall(SYS_futex, &watch.turn, FUTEX_WAIT_PRIVATE, turn, NULL, NULL, 0);
      continue;
    }
    // Reads in a row, as an application would, then one that yields: the
    // writers need the processor too.
    for (int n = 0; n < 64 && atomic_load_explicit(&watch.at, memory_order_acquire) == at; n++) {
      int d = atomic_load(&watch.done);
      uint64_t v = atomic_load(at);
      int i = atomic_load(&watch.issued);
      observe(d, v, i, who);
      atomic_fetch_add(&watch.reads, 1);
    }
    sched_yield();
  }
  return NULL;
}

static void wait_reads(unsigned long n) {
  unsigned long from = atomic_load(&watch.reads);
  while (atomic_load(&watch.reads) < from + n) sched_yield();
}

static void watch_turn(_Atomic uint64_t *at) {
  atomic_store(&watch.at, at);
  atomic_fetch_add(&watch.turn, 1);
  syscall(SYS_futex, &watch.turn, FUTEX_WAKE_PRIVATE, 2, NULL, NULL, 0);
}

// watch_end returns once no spinner looks at the word any more.
static void watch_end(void) {
  atomic_store(&watch.stop_seen, 0);
  watch_turn(NULL);
  while (atomic_load(&watch.stop_seen) != 3) sched_yield();
}

static void watch_begin(struct run *r) {
  memset(watch.vals, 0, sizeof watch.vals);
  atomic_store(&watch.issued, 0);
  atomic_store(&watch.done, 0);
  watch.name = r->name;
  watch.vals[0] = atomic_load(word(r));
  watch_turn(word(r));
  wait_reads(40);
}

// issue announces a value.
static uint64_t issue_value(uint64_t v) {
  int i = atomic_load(&watch.issued) + 1;
  if (i >= NVALS) fail("too many values");
  watch.vals[i] = v;
  atomic_store(&watch.issued, i);
  return v;
}

static uint64_t fresh(struct run *r) {
  uint64_t v = rnd(&r->g) | 1;
  return v;
}

static uint64_t issue(struct run *r) { return issue_value(fresh(r)); }

// written says that the last value announced is there for everybody, and has
// everybody look.
static void written(struct run *r) {
  int i = atomic_load(&watch.issued);
  atomic_store(&watch.done, i);
  observe(i, atomic_load(word(r)), i, "the writer");
  wait_reads(40);
}

static void want(struct run *r, uint64_t got, uint64_t exp, const char *what) {
  if (got != exp)
    fail("%s: slot %zu page %zu: %s: want %016llx got %016llx", r->name, r->slot, r->page, what, (unsigned long long)exp,
         (unsigned long long)got);
}

// ---- helpers -------------------------------------------------------------------------

// Processes that were forked before the slots were there, so that these are not
// shared copy-on-write: they carry out what is in a box of shared memory.
enum task { T_NONE, T_VMWRITE, T_VMREAD, T_MEMWRITE, T_MEMREAD, T_POKE, T_PEEK, T_STORE, T_LOAD, T_PWRITE, T_PREAD, T_QUIT };
struct box {
  atomic_int task, ok;
  void *addr;
  uint64_t val;
  size_t off;
};
static struct box *box;
static pid_t main_pid, helper_pid;
static atomic_int *victim;  // tid of a thread that may be traced

// A file of tmpfs that main and helper have mapped.
#define SHARED_PAGES (64 * SLOT)
static uint8_t *shared;
static int shared_fd;

static int helper_do(struct box *b) {
  struct iovec lo = {&b->val, 8}, re = {b->addr, 8};
  char path[64];
  int fd, st, ok;
  switch (atomic_load(&b->task)) {
    case T_VMWRITE:
      return process_vm_writev(main_pid, &lo, 1, &re, 1, 0) == 8;
    case T_VMREAD:
      return process_vm_readv(main_pid, &lo, 1, &re, 1, 0) == 8;
    case T_MEMWRITE:
    case T_MEMREAD:
      snprintf(path, sizeof path, "/proc/%d/mem", main_pid);
      fd = open(path, O_RDWR);
      if (fd < 0) fd = open(path, O_RDONLY);
      if (fd < 0) return 0;
      ok = (atomic_load(&b->task) == T_MEMWRITE ? pwrite(fd, &b->val, 8, (uintptr_t)b->addr)
                                                 : pread(fd, &b->val, 8, (uintptr_t)b->addr)) == 8;
      close(fd);
      return ok;
    case T_POKE:
    case T_PEEK: {
      pid_t tid = atomic_load(victim);
      must(ptrace(PTRACE_SEIZE, tid, NULL, NULL) == 0, "PTRACE_SEIZE");
      must(ptrace(PTRACE_INTERRUPT, tid, NULL, NULL) == 0, "PTRACE_INTERRUPT");
      must(waitpid(tid, &st, __WALL) == tid && WIFSTOPPED(st), "waitpid for a stop");
      if (atomic_load(&b->task) == T_POKE) {
        ok = ptrace(PTRACE_POKEDATA, tid, b->addr, b->val) == 0;
      } else {
        errno = 0;
        b->val = ptrace(PTRACE_PEEKDATA, tid, b->addr, NULL);
        ok = errno == 0;
      }
      must(ptrace(PTRACE_DETACH, tid, NULL, NULL) == 0, "PTRACE_DETACH");
      return ok;
    }
    case T_STORE:
      *(volatile uint64_t *)(shared + b->off) = b->val;
      return 1;
    case T_LOAD:
      b->val = *(volatile uint64_t *)(shared + b->off);
      return 1;
    case T_PWRITE:
      return pwrite(shared_fd, &b->val, 8, b->off) == 8;
    case T_PREAD:
      return pread(shared_fd, &b->val, 8, b->off) == 8;
  }
  return 0;
}

static void helper_loop(void) {
  prog_name = "hazard (helper)";
  for (;;) {
    int t = atomic_load(&box->task);
    if (t == T_QUIT) _exit(0);
    if (t == T_NONE) {
      syscall(SYS_futex, &box->task, FUTEX_WAIT, T_NONE, NULL, NULL, 0);
      continue;
    }
    atomic_store(&box->ok, helper_do(box));
    atomic_store(&box->task, T_NONE);
    syscall(SYS_futex, &box->task, FUTEX_WAKE, 1, NULL, NULL, 0);
  }
}

static int ask_helper(enum task t, void *addr, uint64_t *val, size_t off) {
  box->addr = addr;
  box->off = off;
  if (val) box->val = *val;
  atomic_store(&box->task, t);
  syscall(SYS_futex, &box->task, FUTEX_WAKE, 1, NULL, NULL, 0);
  while (atomic_load(&box->task) == (int)t) syscall(SYS_futex, &box->task, FUTEX_WAIT, t, NULL, NULL, 0);
  if (val) *val = box->val;
  return atomic_load(&box->ok);
}

static void *victim_main(void *arg) {
  (void)arg;
  atomic_store(victim, (int)syscall(SYS_gettid));
  for (;;) pause();
  return NULL;
}

// child_check waits for a forked child, which has to end with 0.
static void child_check(pid_t pid, const char *what) {
  int st;
  must(waitpid(pid, &st, 0) == pid, "waitpid");
  if (st) fail("%s: a child ended with status %#x", what, st);
}

// Something to synchronise with a forked child: bytes through two pipes.
struct duo {
  pid_t pid;
  int to[2], from[2];
};
static void duo_step(int fd, int write_it) {
  char c = 'x';
  if (write_it)
    must(write(fd, &c, 1) == 1, "write to a child");
  else if (read(fd, &c, 1) != 1)
    fail("the other end of a pipe is gone");
}
static int duo_fork(struct duo *d) {
  must(pipe(d->to) == 0 && pipe(d->from) == 0, "pipe");
  d->pid = fork();
  must(d->pid >= 0, "fork");
  if (d->pid == 0) {
    prog_name = "hazard (child)";
    close(d->to[1]);
    close(d->from[0]);
    return 1;
  }
  close(d->to[0]);
  close(d->from[1]);
  return 0;
}
static void duo_parent_go(struct duo *d) { duo_step(d->to[1], 1); }
static void duo_parent_wait(struct duo *d) { duo_step(d->from[0], 0); }
static void duo_child_go(struct duo *d) { duo_step(d->from[1], 1); }
static void duo_child_wait(struct duo *d) { duo_step(d->to[0], 0); }
static void duo_end(struct duo *d, const char *what) {
  close(d->to[1]);
  close(d->from[0]);
  child_check(d->pid, what);
}

// ---- scenarios: the page is written to ------------------------------------------------

static void sc_store(struct run *r) {
  watch_begin(r);
  for (int k = 0; k < 3; k++) {
    atomic_store(word(r), issue(r));
    written(r);
  }
  watch_end();
  rest(r, 8, "after stores");
}

// The first write is one of the kernel, into a buffer in the page.
static void copy_out(struct run *r, int how) {
  int fd[2] = {-1, -1};
  if (how == 2)
    must(socketpair(AF_UNIX, SOCK_STREAM, 0, fd) == 0, "socketpair");
  else if (how == 1 || how == 5)
    fd[0] = fd[1] = open("/dev/shm", O_TMPFILE | O_RDWR, 0600);
  else
    must(pipe(fd) == 0, "pipe");
  if (fd[0] < 0) fd[0] = fd[1] = syscall(SYS_memfd_create, "x", 0);
  must(fd[0] >= 0, "open");
  watch_begin(r);
  for (int k = 0; k < 3; k++) {
    uint64_t v = issue(r);
    // With two buffers, the other one is in the next page.
    uint64_t *second = (uint64_t *)(slot_page(r->slot, (r->page + 1) % SLOT) + r->off), keep = *second, two[2] = {v, ~v};
    size_t len = how >= 3 || (how == 2 && k & 1) ? 16 : 8;
    if (how == 1 || how == 5)
      must(pwrite(fd[1], two, len, 0) == (ssize_t)len, "pwrite");
    else
      must(write(fd[1], two, len) == (ssize_t)len, "write");
    ssize_t n = 0;
    struct iovec io[2] = {{(void *)word(r), 8}, {second, 8}};
    struct msghdr m = {.msg_iov = io, .msg_iovlen = 2};
    switch (how) {
      case 0:
        n = read(fd[0], (void *)word(r), 8);
        break;
      case 1:
        n = pread(fd[0], (void *)word(r), 8, 0);
        break;
      case 2:
        n = k & 1 ? recvmsg(fd[0], &m, 0) : recv(fd[0], (void *)word(r), 8, 0);
        break;
      case 3:
        n = readv(fd[0], io, 2);
        break;
      case 5:
        n = preadv(fd[0], io, 2, 0);
        break;
    }
    must(n == (ssize_t)len, "a read into the page");
    written(r);
    if (len == 16) want(r, *(volatile uint64_t *)second, ~v, "the second buffer of a read");
    *(volatile uint64_t *)second = keep;
  }
  watch_end();
  close(fd[0]);
  if (fd[1] != fd[0]) close(fd[1]);
  rest(r, 8, "after reads into the page");
}
static void sc_read(struct run *r) { copy_out(r, 0); }
static void sc_pread(struct run *r) { copy_out(r, 1); }
static void sc_recv(struct run *r) { copy_out(r, 2); }
static void sc_readv(struct run *r) { copy_out(r, 3); }
static void sc_preadv(struct run *r) { copy_out(r, 5); }

// A long read over all pages of the slot; the spinner watches one of them.
static void sc_bigread(struct run *r) {
  int fd = syscall(SYS_memfd_create, "big", 0);
  uint8_t *buf = map_or_die(SLOT, RW, ANON, -1);
  must(fd >= 0, "memfd_create");
  watch_begin(r);
  for (int k = 0; k < 2; k++) {
    gen_random(buf, SLOT * PAGE, rnd(&r->g));
    uint64_t v = fresh(r);
    memcpy(buf + r->page * PAGE + r->off, &v, 8);
    must(pwrite(fd, buf, SLOT * PAGE, 0) == SLOT * PAGE, "pwrite");
    issue_value(v);
    must(pread(fd, slot_page(r->slot, 0), SLOT * PAGE, 0) == SLOT * PAGE, "pread");
    written(r);
    if (memcmp(buf, slot_page(r->slot, 0), SLOT * PAGE)) fail("bigread: the slot is not what was read into it");
  }
  watch_end();
  munmap(buf, SLOT * PAGE);
  close(fd);
}

static void by_helper(struct run *r, enum task t, const char *what) {
  watch_begin(r);
  for (int k = 0; k < 3; k++) {
    uint64_t v = issue(r);
    if (!ask_helper(t, (void *)word(r), &v, 0)) {
      watch_end();
      unsupported(what);
      return;
    }
    written(r);
  }
  watch_end();
  rest(r, 8, what);
}
static void sc_vmwrite(struct run *r) { by_helper(r, T_VMWRITE, "process_vm_writev"); }
static void sc_procmem(struct run *r) { by_helper(r, T_MEMWRITE, "/proc/pid/mem"); }
static void sc_poke(struct run *r) { by_helper(r, T_POKE, "POKEDATA"); }

static void sc_selfmem(struct run *r) {
  int fd = open("/proc/self/mem", O_RDWR);
  if (fd < 0) {
    unsupported("/proc/self/mem");
    return;
  }
  watch_begin(r);
  for (int k = 0; k < 3; k++) {
    uint64_t v = issue(r);
    if (pwrite(fd, &v, 8, (uintptr_t)word(r)) != 8) {
      watch_end();
      close(fd);
      unsupported("write to /proc/self/mem");
      return;
    }
    written(r);
  }
  watch_end();
  close(fd);
  rest(r, 8, "after writes to /proc/self/mem");
}

// Reads by others see what was stored, and leave the page as it is.
static void sc_readers(struct run *r) {
  static const enum task how[] = {T_VMREAD, T_MEMREAD, T_PEEK};
  int p[2], self = open("/proc/self/mem", O_RDONLY);
  must(self >= 0 && pipe(p) == 0, "pipe");
  watch_begin(r);
  uint64_t now = atomic_load(word(r)), v;
  for (int k = 0; k < 3; k++) {
    for (size_t i = 0; i < 3; i++) {
      v = 0;
      must(ask_helper(how[(i + r->slot) % 3], (void *)word(r), &v, 0), "a read by another process");
      want(r, v, now, "read by another process");
    }
    must(pread(self, &v, 8, (uintptr_t)word(r)) == 8, "pread");
    want(r, v, now, "/proc/self/mem");
    must(write(p[1], (void *)word(r), 8) == 8 && read(p[0], &v, 8) == 8, "pipe");
    want(r, v, now, "write(2) from the page");
    now = issue(r);
    atomic_store(word(r), now);
    written(r);
  }
  watch_end();
  close(self);
  close(p[0]);
  close(p[1]);
  rest(r, 8, "after reads by others");
}

// The kernel writes what calls return. Each is the first write to its page.
static void sc_results(struct run *r) {
  size_t page = 0;
  uint8_t *p;
  uint64_t was;
#define NEXT                              \
  page = (page + 1) % SLOT;               \
  p = slot_page(r->slot, page) + 64;      \
  was = *(volatile uint64_t *)p;          \
  (void)was;
#define CHANGED(what) \
  if (*(volatile uint64_t *)p == was) fail("results: %s: the page holds what it held before the call", what);
  NEXT must(getrandom(p, 64, 0) == 64, "getrandom");
  CHANGED("getrandom")
  NEXT {
    struct utsname u;
    must(uname((struct utsname *)p) == 0 && uname(&u) == 0, "uname");
    if (memcmp(p, &u, sizeof u)) fail("results: uname");
  }
  NEXT must(getcwd((char *)p, 256) != NULL, "getcwd");
  if (strcmp((char *)p, "/")) fail("results: getcwd: %.20s", p);
  NEXT {
    struct stat s;
    must(stat("/", (struct stat *)p) == 0 && stat("/", &s) == 0, "stat");
    if (memcmp(p, &s, sizeof s)) fail("results: stat");
  }
  NEXT {
    struct statfs s;
    must(statfs("/dev/shm", (struct statfs *)p) == 0 && statfs("/dev/shm", &s) == 0, "statfs");
    if (((struct statfs *)p)->f_type != s.f_type || ((struct statfs *)p)->f_bsize != s.f_bsize) fail("results: statfs");
  }
  NEXT must(syscall(SYS_clock_gettime, CLOCK_REALTIME, p) == 0, "clock_gettime");
  CHANGED("clock_gettime")
  NEXT must(syscall(SYS_gettimeofday, p, NULL) == 0, "gettimeofday");
  CHANGED("gettimeofday")
  NEXT {
    struct rlimit l;
    must(getrlimit(RLIMIT_NOFILE, (struct rlimit *)p) == 0 && getrlimit(RLIMIT_NOFILE, &l) == 0, "getrlimit");
    if (memcmp(p, &l, sizeof l)) fail("results: getrlimit");
  }
  NEXT must(getrusage(RUSAGE_SELF, (struct rusage *)p) == 0, "getrusage");
  CHANGED("getrusage")
  NEXT must(sysinfo((struct sysinfo *)p) == 0, "sysinfo");
  CHANGED("sysinfo")
  NEXT {
    int *fds = (int *)p;
    must(pipe(fds) == 0, "pipe");
    must(write(fds[1], "0123456789", 10) == 10, "a pipe whose descriptors were returned in the page");
    NEXT must(ioctl(fds[0], 0x541b /* FIONREAD */, p) == 0, "FIONREAD");
    if (*(int *)p != 10) fail("results: FIONREAD: %d", *(int *)p);
    NEXT {
      struct pollfd *f = (struct pollfd *)p;
      *f = (struct pollfd){fds[0], POLLIN, 0};
      must(poll(f, 1, 0) == 1 && f->revents == POLLIN, "poll");
    }
    NEXT {
      fd_set *s = (fd_set *)p;
      FD_ZERO(s);
      FD_SET(fds[0], s);
      FD_SET(fds[1], s);
      struct timeval z = {0, 0};
      must(fds[1] < FD_SETSIZE && select(fds[1] + 1, s, NULL, NULL, &z) == 1, "select");
      if (!FD_ISSET(fds[0], s) || FD_ISSET(fds[1], s)) fail("results: select");
    }
    NEXT {
      int ep = epoll_create1(0);
      struct epoll_event e = {.events = EPOLLIN, .data.u64 = 0x1122334455667788};
      must(ep >= 0 && epoll_ctl(ep, EPOLL_CTL_ADD, fds[0], &e) == 0, "epoll_ctl");
      must(epoll_wait(ep, (struct epoll_event *)p, 4, 0) == 1, "epoll_wait");
      if (((struct epoll_event *)p)->data.u64 != e.data.u64) fail("results: epoll_wait");
      close(ep);
    }
    close(fds[0]);
    close(fds[1]);
  }
  NEXT {
    sigset_t none;
    sigemptyset(&none);
    memset(p, 0xff, 8);
    must(syscall(SYS_rt_sigprocmask, SIG_BLOCK, &none, p, 8) == 0, "sigprocmask");
    if (*(uint64_t *)p == ~0ULL) fail("results: sigprocmask");
  }
  NEXT {
    socklen_t *len = (socklen_t *)(p + 64);
    int s = socket(AF_UNIX, SOCK_STREAM, 0);
    *len = 4;
    must(s >= 0 && getsockopt(s, SOL_SOCKET, SO_TYPE, p, len) == 0, "getsockopt");
    if (*(int *)p != SOCK_STREAM || *len != 4) fail("results: getsockopt: %d", *(int *)p);
    close(s);
  }
  NEXT {
    pid_t pid = fork();
    must(pid >= 0, "fork");
    if (pid == 0) _exit(37);
    must(wait4(pid, (int *)p, 0, NULL) == pid, "wait4");
    if (!WIFEXITED(*(int *)p) || WEXITSTATUS(*(int *)p) != 37) fail("results: wait4: %#x", *(int *)p);
  }
  NEXT {
    int fd = open("/proc/self", O_RDONLY | O_DIRECTORY);
    must(fd >= 0, "open");
    long n = syscall(SYS_getdents64, fd, p, 1024);
    must(n > 24, "getdents64");
    CHANGED("getdents64")
    close(fd);
  }
  NEXT must(prctl(PR_GET_NAME, p) == 0, "PR_GET_NAME");
  if (strncmp((char *)p, "hazard", 6)) fail("results: PR_GET_NAME: %.16s", p);
  NEXT must(syscall(SYS_sched_getaffinity, 0, 128, p) > 0, "sched_getaffinity");
  if (*(uint64_t *)p == 0) fail("results: sched_getaffinity");
  NEXT {
    ssize_t n = readlink("/proc/self/exe", (char *)p, 512);
    must(n > 0, "readlink");
    if (!memmem(p, n, "hazard", 6)) fail("results: readlink: %.20s", p);
  }
  NEXT must(syscall(SYS_get_robust_list, 0, p, p + 8) == 0, "get_robust_list");
  if (*(uint64_t *)(p + 8) != 24) fail("results: get_robust_list: %llu", *(unsigned long long *)(p + 8));
#undef NEXT
#undef CHANGED
  // What surrounds the results is as it was.
  for (size_t k = 0; k < SLOT; k++) check_page(slot_page(r->slot, k), r->slot, k, 64, 3000, "around the results of calls");
}

// The kernel reads from pages of the template and from others in one call, and
// writes to such.
static void sc_iovec(struct run *r) {
  enum { N = 12 };
  uint8_t *mine = map_or_die(N, RW, ANON, -1);
  uint8_t expect[N * 1000], got[N * 1000];
  struct iovec io[N];
  size_t n = 0;
  int fd = syscall(SYS_memfd_create, "iov", 0), sp[2];
  must(fd >= 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, sp) == 0, "memfd_create");
  for (int i = 0; i < N; i++) {
    size_t len = 1 + below(&r->g, 999), page = below(&r->g, SLOT - 1);
    uint8_t tmp[2 * PAGE], *from;
    size_t off = below(&r->g, PAGE);
    if (i % 3 == 2) {
      gen_random(mine + i * PAGE, PAGE, rnd(&r->g));
      from = mine + i * PAGE + off % (PAGE - len);
      memcpy(expect + n, from, len);
    } else {
      // May span two pages.
      original(tmp, r->slot, page);
      original(tmp + PAGE, r->slot, page + 1);
      from = slot_page(r->slot, page) + off;
      memcpy(expect + n, tmp + off, len);
    }
    io[i] = (struct iovec){from, len};
    n += len;
  }
  must(writev(fd, io, N) == (ssize_t)n, "writev");
  must(pread(fd, got, n, 0) == (ssize_t)n, "pread");
  if (memcmp(got, expect, n)) fail("iovec: writev wrote something else");
  must(writev(sp[0], io, N) == (ssize_t)n, "writev to a socket");
  must(recv(sp[1], got, n, MSG_WAITALL) == (ssize_t)n, "recv");
  if (memcmp(got, expect, n)) fail("iovec: writev sent something else");
  rest(r, 0, "after writev from it");
  // The other direction; pieces that do not overlap.
  watch_begin(r);
  uint64_t v = issue(r);
  size_t other = (r->page + 1 + below(&r->g, SLOT - 2)) % SLOT;
  uint8_t a[64], b[64];
  gen_random(a, 64, rnd(&r->g));
  gen_random(b, 64, rnd(&r->g));
  struct iovec in[4] = {{mine, 64}, {(void *)word(r), 8}, {slot_page(r->slot, other) + 100, 64}, {mine + PAGE, 64}};
  struct iovec src[4] = {{a, 64}, {&v, 8}, {b, 64}, {a, 64}};
  must(pwritev(fd, src, 4, 0) == 200, "pwritev");
  must(preadv(fd, in, 4, 0) == 200, "preadv");
  written(r);
  watch_end();
  if (memcmp(mine, a, 64) || memcmp(mine + PAGE, a, 64) || memcmp(slot_page(r->slot, other) + 100, b, 64))
    fail("iovec: preadv read something else");
  original(got, r->slot, other);
  memcpy(slot_page(r->slot, other) + 100, got + 100, 64);
  rest(r, 8, "after preadv into it");
  munmap(mine, N * PAGE);
  close(fd);
  close(sp[0]);
  close(sp[1]);
}

// ---- scenarios: fork --------------------------------------------------------------------

// A child writes; its parent must not see it.
static void sc_fork_child(struct run *r) {
  struct duo d;
  int p[2];
  watch_begin(r);
  uint64_t was = atomic_load(word(r));
  must(pipe(p) == 0, "pipe");
  if (duo_fork(&d)) {
    for (int k = 0; k < 3; k++) {
      uint64_t v = fresh(r), got;
      if (k & 1) {
        must(write(p[1], &v, 8) == 8 && read(p[0], (void *)word(r), 8) == 8, "read");
      } else {
        atomic_store(word(r), v);
      }
      want(r, atomic_load(word(r)), v, "a child reads what it wrote");
      must(write(p[1], (void *)word(r), 8) == 8 && read(p[0], &got, 8) == 8, "pipe");
      want(r, got, v, "the kernel reads what a child wrote");
      duo_child_go(&d);
      duo_child_wait(&d);
      want(r, atomic_load(word(r)), v, "a child reads what it wrote before its parent");
    }
    rest(r, 8, "in a child");
    _exit(0);
  }
  for (int k = 0; k < 3; k++) {
    duo_parent_wait(&d);
    wait_reads(40);
    uint64_t got;
    must(write(p[1], (void *)word(r), 8) == 8 && read(p[0], &got, 8) == 8, "pipe");
    want(r, got, k ? watch.vals[k] : was, "the kernel reads the parent's page after its child wrote");
    atomic_store(word(r), issue(r));
    written(r);
    duo_parent_go(&d);
  }
  duo_end(&d, r->name);
  watch_end();
  close(p[0]);
  close(p[1]);
  rest(r, 8, "after a child wrote");
}

// The parent writes; the child must not see it. Then the child is the only owner
// of the page, and writes in place.
static void sc_fork_parent(struct run *r) {
  struct duo d;
  int p[2], route = below(&r->g, 3);
  must(pipe(p) == 0, "pipe");
  watch_begin(r);
  uint64_t was = atomic_load(word(r));
  if (duo_fork(&d)) {
    want(r, atomic_load(word(r)), was, "a child before the parent writes");
    duo_child_go(&d);
    duo_child_wait(&d);
    for (int k = 0; k < 3; k++) {
      want(r, atomic_load(word(r)), was, "a child reads after its parent wrote");
      rest(r, 0, "in a child after its parent wrote");
    }
    uint64_t v = fresh(r);
    if (route == 0)
      atomic_store(word(r), v);
    else
      must(write(p[1], &v, 8) == 8 && read(p[0], (void *)word(r), 8) == 8, "read");
    want(r, atomic_load(word(r)), v, "a child that has become the only owner reads what it wrote");
    rest(r, 8, "in a child that has become the only owner");
    _exit(0);
  }
  duo_parent_wait(&d);
  uint64_t v = issue(r);
  if (route == 2)
    must(write(p[1], &v, 8) == 8 && read(p[0], (void *)word(r), 8) == 8, "read");
  else
    atomic_store(word(r), v);
  written(r);
  duo_parent_go(&d);
  duo_end(&d, r->name);
  want(r, atomic_load(word(r)), v, "the parent after the child wrote and ended");
  watch_end();
  close(p[0]);
  close(p[1]);
  rest(r, 8, "after a fork");
}

// A child shares the page, then ends or executes something else, and the parent
// is the only owner again.
static void sc_fork_unique(struct run *r) {
  int p[2], route = below(&r->g, 4);
  must(pipe(p) == 0, "pipe");
  watch_begin(r);
  struct duo d;
  if (duo_fork(&d)) {
    volatile uint64_t v = atomic_load(word(r));
    (void)v;
    duo_child_go(&d);
    if (route & 1) {
      char fds[2][16], *argv[] = {"hazard", "--wait", fds[0], fds[1], NULL}, *env[] = {NULL};
      snprintf(fds[0], 16, "--in=%d", d.to[0]);
      snprintf(fds[1], 16, "--out=%d", d.from[1]);
      execve("/proc/self/exe", argv, env);
      die("execve");
    }
    _exit(0);
  }
  duo_parent_wait(&d);
  if (route & 1)
    duo_parent_wait(&d);  // it has executed
  else
    duo_end(&d, r->name);
  for (int k = 0; k < 3; k++) {
    uint64_t v = issue(r);
    if ((route & 2) && k == 0)
      must(write(p[1], &v, 8) == 8 && read(p[0], (void *)word(r), 8) == 8, "read");
    else
      atomic_store(word(r), v);
    written(r);
  }
  if (route & 1) {
    duo_parent_go(&d);
    duo_end(&d, r->name);
  }
  watch_end();
  close(p[0]);
  close(p[1]);
  rest(r, 8, "after the parent was the only owner again");
}

// Another process writes into a child's copy while parent, child and grandchild
// share the page.
static void sc_fork_remote(struct run *r) {
  struct duo d;
  watch_begin(r);
  uint64_t was = atomic_load(word(r)), v = fresh(r);
  if (duo_fork(&d)) {
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    want(r, atomic_load(word(r)), was, "a child");
    pid_t g = fork();
    must(g >= 0, "fork");
    if (g == 0) {
      want(r, atomic_load(word(r)), was, "a grandchild");
      uint64_t o = fresh(r) ^ 2;
      atomic_store(word(r), o);
      want(r, atomic_load(word(r)), o, "a grandchild after it wrote");
      _exit(0);
    }
    child_check(g, r->name);
    duo_child_go(&d);
    duo_child_wait(&d);
    want(r, atomic_load(word(r)), v, "a child after process_vm_writev by its parent");
    rest(r, 8, "in a child");
    _exit(0);
  }
  duo_parent_wait(&d);
  struct iovec lo = {&v, 8}, re = {(void *)word(r), 8};
  must(process_vm_writev(d.pid, &lo, 1, &re, 1, 0) == 8, "process_vm_writev");
  wait_reads(40);
  duo_parent_go(&d);
  duo_end(&d, r->name);
  atomic_store(word(r), issue(r));
  written(r);
  watch_end();
  rest(r, 8, "after process_vm_writev into a child");
}

// While the page is shared copy-on-write, the kernel reads it, so it is in the
// memory file and mapped from the template at the same time. Then the child is
// gone, the parent stores to a neighbour (and owns all of them again), and the
// kernel writes to the page.
// Some hogs keep the kernel busy with this address space, for longer than an
// eviction is ready to wait, by reads of a gigabyte of nothing into the same
// megabyte.
static void *hog(void *arg) {
  enum { N = 1024 };
  int fd = syscall(SYS_memfd_create, "hog", 0);
  uint8_t *buf = map_or_die(256, RW, ANON, -1);
  struct iovec io[N];
  (void)arg;
  must(fd >= 0 && ftruncate(fd, N << 20) == 0, "memfd_create");
  for (int i = 0; i < N; i++) io[i] = (struct iovec){buf, 1 << 20};
  for (int64_t end = now_ns() + 450000000; now_ns() < end;)
    must(preadv(fd, io, N, 0) == (ssize_t)N << 20, "preadv");
  munmap(buf, 256 * PAGE);
  close(fd);
  return NULL;
}

static void cow_kernel(struct run *r, int pause_ms) {
  struct duo d;
  int p[2];
  must(pipe(p) == 0, "pipe");
  check_slot(r->slot, "before a fork");
  if (duo_fork(&d)) {
    check_slot(r->slot, "in a child");
    duo_child_go(&d);
    duo_child_wait(&d);
    _exit(0);
  }
  duo_parent_wait(&d);
  check_slot(r->slot, "after a fork");  // maps it again
  uint64_t got[SLOT], v;
  for (size_t k = 0; k < SLOT; k++) {
    must(write(p[1], slot_page(r->slot, k) + r->off, 8) == 8 && read(p[0], &got[k], 8) == 8, "pipe");
    want(r, got[k], *(volatile uint64_t *)(slot_page(r->slot, k) + r->off), "the kernel reads a shared page");
  }
  // An eviction begins if nobody runs for a while and there is something to gain,
  // and ends at once if somebody does.
  if (pause_ms) {
    uint8_t *some = map_or_die(512, RW, ANON, -1);
    gen_text(some, 512 * PAGE, rnd(&r->g));
    if (pause_ms > 0) {
      sleep_ms(pause_ms);
    } else {
      pthread_t th[3];
      for (int i = 0; i < 3; i++) must(pthread_create(&th[i], NULL, hog, NULL) == 0, "pthread_create");
      for (int i = 0; i < 3; i++) pthread_join(th[i], NULL);
    }
    munmap(some, 512 * PAGE);
  }
  check_slot(r->slot, "before the child ends");
  duo_parent_go(&d);
  duo_end(&d, r->name);
  size_t near = (r->page + SLOT / 2) % SLOT;
  if (below(&r->g, 4)) *(volatile uint64_t *)(slot_page(r->slot, near) + r->off) = got[near];
  watch_begin(r);
  v = issue(r);
  must(write(p[1], &v, 8) == 8 && read(p[0], (void *)word(r), 8) == 8, "pipe");
  written(r);
  watch_end();
  rest(r, 8, "after the kernel wrote to one page");
  for (size_t k = 0; k < SLOT; k++) {
    volatile uint64_t *w = (uint64_t *)(slot_page(r->slot, k) + r->off);
    v = *w + 1;
    must(write(p[1], &v, 8) == 8 && read(p[0], (void *)w, 8) == 8, "pipe");
    want(r, *w, v, "the kernel wrote to a page that was shared");
  }
  close(p[0]);
  close(p[1]);
}
static void sc_cow_kernel(struct run *r) { cow_kernel(r, 0); }
static void sc_pause(struct run *r) { cow_kernel(r, 198 + below(&r->g, 50)); }
static void sc_busy(struct run *r) { cow_kernel(r, -1); }

// vfork and posix_spawn: a child that shares the address space writes.
static void sc_vfork(struct run *r) {
  // Not a variable that a vforked child could clobber.
  static volatile uint64_t *at;
  at = (volatile uint64_t *)word(r);
  watch_begin(r);
  uint64_t v = issue(r);
  pid_t pid = vfork();
  if (pid == 0) {
    *at = v;
    _exit(0);
  }
  must(pid > 0, "vfork");
  written(r);
  child_check(pid, r->name);
  v = issue(r);
  pid = vfork();
  if (pid == 0) {
    *at = v;
    char *argv[] = {"hazard", "--exit", NULL}, *env[] = {NULL};
    execve("/proc/self/exe", argv, env);
    _exit(1);
  }
  must(pid > 0, "vfork");
  written(r);
  child_check(pid, r->name);
  char *argv[] = {"hazard", "--exit", NULL}, *env[] = {NULL};
  must(posix_spawn(&pid, "/proc/self/exe", NULL, NULL, argv, env) == 0, "posix_spawn");
  atomic_store(word(r), issue(r));
  written(r);
  child_check(pid, r->name);
  watch_end();
  rest(r, 8, "after vfork");
}

// ---- scenarios: mappings change -----------------------------------------------------------

static uint8_t *fresh_range(size_t pages) {
  return map_or_die(pages, PROT_NONE, ANON | MAP_NORESERVE, -1);
}

static void sc_mremap(struct run *r) {
  uint8_t *from = slot_page(r->slot, 0), *to = fresh_range(SLOT);
  int p[2];
  must(pipe(p) == 0, "pipe");
  check_slot(r->slot, "before mremap");  // maps it
  dirty[r->slot] = 2;
  must(mremap(from, SLOT * PAGE, SLOT * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to, "mremap");
  if (below(&r->g, 2)) access_signal(to, 0);
  r->p = to + r->page * PAGE;
  watch_begin(r);
  uint64_t v = issue(r);
  if (below(&r->g, 2))
    atomic_store(word(r), v);
  else
    must(write(p[1], &v, 8) == 8 && read(p[0], (void *)word(r), 8) == 8, "read");
  written(r);
  watch_end();
  if (access_signal(from, 0) != SIGSEGV) fail("mremap: the old range can be read");
  rest(r, 8, "after mremap");
  // And back, watched word written.
  must(mremap(to, SLOT * PAGE, SLOT * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, from) == from, "mremap back");
  r->p = from + r->page * PAGE;
  want(r, atomic_load(word(r)), v, "after mremap back");
  watch_begin(r);
  for (int k = 0; k < 2; k++) {
    atomic_store(word(r), issue(r));
    written(r);
  }
  watch_end();
  rest(r, 8, "after mremap back");
  close(p[0]);
  close(p[1]);
}

// A part of the slot moves, twice over, while it is the template's.
static void sc_mremap_part(struct run *r) {
  uint8_t *from = slot_page(r->slot, 0), *to = fresh_range(3 * SLOT);
  check_slot(r->slot, "before mremap");
  dirty[r->slot] = 2;
  size_t a = 5, n = 14;
  r->page = a + below(&r->g, n);
  must(mremap(from + a * PAGE, n * PAGE, n * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to + PAGE) == to + PAGE, "mremap");
  for (size_t k = 0; k < n; k++) check_page(to + (1 + k) * PAGE, r->slot, a + k, 0, 0, "moved by mremap");
  must(mremap(to + PAGE, n * PAGE, 2 * n * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to + SLOT * PAGE) == to + SLOT * PAGE,
       "mremap, growing");
  r->p = to + (SLOT + r->page - a) * PAGE;
  watch_begin(r);
  atomic_store(word(r), issue(r));
  written(r);
  watch_end();
  for (size_t k = 0; k < n; k++)
    check_page(to + (SLOT + k) * PAGE, r->slot, a + k, a + k == r->page ? r->off : 0, a + k == r->page ? 8 : 0, "moved again");
  if (!all_zero(to + (SLOT + n) * PAGE, n * PAGE)) fail("mremap: what grew is not zero");
  for (size_t k = 0; k < SLOT; k++)
    if (k < a || k >= a + n) check_page(from + k * PAGE, r->slot, k, 0, 0, "left behind by mremap");
  must(mremap(to + SLOT * PAGE, n * PAGE, n * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, from + a * PAGE) == from + a * PAGE,
       "mremap back");
  r->p = from + r->page * PAGE;
  rest(r, 8, "after mremap back");
  munmap(to, 3 * SLOT * PAGE);
}

static void sc_mprotect(struct run *r) {
  uint8_t *s = slot_page(r->slot, 0);
  int p[2], whole = below(&r->g, 2);
  uint8_t *m = whole ? s : r->p;
  size_t len = (whole ? SLOT : 1) * PAGE;
  must(pipe(p) == 0, "pipe");
  watch_begin(r);
  must(mprotect(m, len, PROT_READ) == 0, "mprotect");
  wait_reads(40);
  if (access_signal(r->p + r->off, 1) != SIGSEGV) fail("mprotect: a read-only page was written to");
  uint64_t v = fresh(r);
  must(write(p[1], &v, 8) == 8, "write");
  if (read(p[0], (void *)word(r), 8) != -1 || errno != EFAULT) fail("mprotect: read(2) into a read-only page");
  must(read(p[0], &v, 8) == 8, "read");
  must(mprotect(m, len, RW) == 0, "mprotect");
  wait_reads(40);
  atomic_store(word(r), issue(r));
  written(r);
  must(mprotect(m, len, PROT_READ) == 0, "mprotect");
  wait_reads(40);
  if (access_signal(r->p + r->off, 1) != SIGSEGV) fail("mprotect: a read-only page was written to");
  // ptrace and /proc/pid/mem may all the same.
  v = issue(r);
  if (ask_helper(T_POKE, (void *)word(r), &v, 0))
    written(r);
  else
    fail("mprotect: POKEDATA into a read-only page");
  must(mprotect(m, len, RW) == 0, "mprotect");
  v = issue(r);
  must(write(p[1], &v, 8) == 8 && read(p[0], (void *)word(r), 8) == 8, "read");
  written(r);
  watch_end();
  must(mprotect(m, len, PROT_NONE) == 0, "mprotect");
  if (access_signal(r->p + r->off, 0) != SIGSEGV) fail("mprotect: a PROT_NONE page was read");
  must(mprotect(m, len, RW) == 0, "mprotect");
  want(r, atomic_load(word(r)), v, "after PROT_NONE");
  rest(r, 8, "after mprotect");
  close(p[0]);
  close(p[1]);
}

// Code that was data in the template, and changes after it has run.
static void sc_jit(struct run *r) {
  dirty[r->slot] = 2;
  uint8_t *p = slot_page(r->slot, 0);
  volatile uint64_t v = *(uint64_t *)p;
  (void)v;
  int rwx = below(&r->g, 2);
  for (int k = 0; k < 4; k++) {
    uint32_t c = rnd(&r->g);
    uint8_t code[6] = {0xb8, 0, 0, 0, 0, 0xc3};  // mov eax, c; ret
    memcpy(code + 1, &c, 4);
    if (rwx) {
      if (k == 0) must(mprotect(p, SLOT * PAGE, RW | PROT_EXEC) == 0, "mprotect");
      memcpy(p + r->off % 4000, code, 6);
    } else {
      must(mprotect(p, SLOT * PAGE, RW) == 0, "mprotect");
      memcpy(p + r->off % 4000, code, 6);
      must(mprotect(p, SLOT * PAGE, PROT_READ | PROT_EXEC) == 0, "mprotect");
    }
    __builtin___clear_cache((char *)p, (char *)p + PAGE);
    uint32_t (*f)(void) = (uint32_t(*)(void))(uintptr_t)(p + r->off % 4000);
    if (f() != c) fail("jit: code in a page of the template does not run as written");
  }
  must(mprotect(p, SLOT * PAGE, RW) == 0, "mprotect");
  for (size_t k = 1; k < SLOT; k++) check_page(slot_page(r->slot, k), r->slot, k, 0, 0, "beside code");
}

static void sc_dontneed(struct run *r) {
  int p[2], whole = below(&r->g, 2);
  must(pipe(p) == 0, "pipe");
  watch_begin(r);
  issue_value(0);
  must(madvise(whole ? slot_page(r->slot, 0) : r->p, (whole ? SLOT : 1) * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
  written(r);
  if (!all_zero(r->p, PAGE)) fail("dontneed: not all zero");
  uint64_t v = issue(r);
  if (below(&r->g, 2))
    atomic_store(word(r), v);
  else
    must(write(p[1], &v, 8) == 8 && read(p[0], (void *)word(r), 8) == 8, "read");
  written(r);
  watch_end();
  dirty[r->slot] = 2;
  for (size_t k = 0; k < SLOT; k++) {
    uint8_t *q = slot_page(r->slot, k);
    if (k == r->page) {
      uint8_t b[PAGE];
      memcpy(b, q, PAGE);
      memset(b + r->off, 0, 8);
      if (!all_zero(b, PAGE)) fail("dontneed: a page is not zero but for what was written");
    } else if (whole) {
      if (!all_zero(q, PAGE)) fail("dontneed: page %zu is not zero", k);
    } else {
      check_page(q, r->slot, k, 0, 0, "beside MADV_DONTNEED");
    }
  }
  close(p[0]);
  close(p[1]);
}

static void sc_mapfixed(struct run *r) {
  dirty[r->slot] = 2;
  watch_begin(r);
  issue_value(0);
  must(mmap(r->p, PAGE, RW, ANON | MAP_FIXED, -1, 0) == r->p, "mmap");
  written(r);
  atomic_store(word(r), issue(r));
  written(r);
  // A file over it.
  int fd = syscall(SYS_memfd_create, "fixed", 0);
  uint64_t v = issue(r);
  must(fd >= 0 && ftruncate(fd, PAGE) == 0 && pwrite(fd, &v, 8, r->off) == 8, "memfd_create");
  must(mmap(r->p, PAGE, RW, (below(&r->g, 2) ? MAP_SHARED : MAP_PRIVATE) | MAP_FIXED, fd, 0) == r->p, "mmap");
  written(r);
  atomic_store(word(r), issue(r));
  written(r);
  watch_end();
  must(munmap(r->p, PAGE) == 0, "munmap");
  if (access_signal(r->p, 0) != SIGSEGV) fail("mapfixed: an unmapped page was read");
  must(mmap(r->p, PAGE, RW, ANON | MAP_FIXED, -1, 0) == r->p, "mmap");
  if (!all_zero(r->p, PAGE)) fail("mapfixed: a new page is not zero");
  close(fd);
  for (size_t k = 0; k < SLOT; k++)
    if (k != r->page) check_page(slot_page(r->slot, k), r->slot, k, 0, 0, "beside a mapping made anew");
}

// Small changes in the middle of a large template mapping.
static void sc_split(struct run *r) {
  dirty[r->slot] = 2;
  check_slot(r->slot, "before it is split");
  uint8_t *s = slot_page(r->slot, 0);
  must(mprotect(s + 9 * PAGE, PAGE, PROT_READ) == 0, "mprotect");
  must(munmap(s + 17 * PAGE, PAGE) == 0, "munmap");
  must(madvise(s + 3 * PAGE, 2 * PAGE, MADV_DONTFORK) == 0, "MADV_DONTFORK");
  r->page = (size_t[]){8, 10, 16, 18, 2, 3, 5, 9}[below(&r->g, 8)];
  r->p = s + r->page * PAGE;
  if (r->page == 9) must(mprotect(s + 9 * PAGE, PAGE, RW) == 0, "mprotect");
  watch_begin(r);
  pid_t pid = fork();
  must(pid >= 0, "fork");
  if (pid == 0) {
    if (access_signal(s + 3 * PAGE, 0) != SIGSEGV) fail("split: a child has what it should not have inherited");
    if (r->page != 3 && r->page != 4) {
      check_page(r->p, r->slot, r->page, 0, 0, "in a child");
      atomic_store(word(r), 1);
    }
    _exit(0);
  }
  wait_reads(20);
  child_check(pid, r->name);
  atomic_store(word(r), issue(r));
  written(r);
  watch_end();
  for (size_t k = 0; k < SLOT; k++)
    if (k != 17) check_page(s + k * PAGE, r->slot, k, k == r->page ? r->off : 0, k == r->page ? 8 : 0, "after it was split");
  must(mprotect(s + 9 * PAGE, PAGE, RW) == 0 && madvise(s + 3 * PAGE, 2 * PAGE, MADV_DOFORK) == 0, "mprotect");
  must(mmap(s + 17 * PAGE, PAGE, RW, ANON | MAP_FIXED, -1, 0) == s + 17 * PAGE, "mmap");
}

static void sc_mlock(struct run *r) {
  uint8_t *s = slot_page(r->slot, 0);
  watch_begin(r);
  switch (below(&r->g, 3)) {
    case 0:
      must(mlock(s, SLOT * PAGE) == 0, "mlock");
      break;
    case 1:
      must(syscall(SYS_mlock2, s, SLOT * PAGE, 1 /* MLOCK_ONFAULT */) == 0, "mlock2");
      break;
    case 2:
      must(madvise(s, SLOT * PAGE, MADV_WILLNEED) == 0, "MADV_WILLNEED");
      if (madvise(s, SLOT * PAGE, 22 /* MADV_POPULATE_READ */)) unsupported("MADV_POPULATE_READ");
      if (madvise(s, SLOT * PAGE, 23 /* MADV_POPULATE_WRITE */)) unsupported("MADV_POPULATE_WRITE");
      break;
  }
  wait_reads(40);
  for (int k = 0; k < 2; k++) {
    atomic_store(word(r), issue(r));
    written(r);
  }
  must(munlock(s, SLOT * PAGE) == 0, "munlock");
  wait_reads(20);
  atomic_store(word(r), issue(r));
  written(r);
  watch_end();
  rest(r, 8, "after mlock");
}

// ---- scenarios: what the kernel writes on its own ---------------------------------------------

static void sc_futex_op(struct run *r) {
  r->off &= ~7UL;
  int dummy = 0;
  watch_begin(r);
  for (int k = 0; k < 3; k++) {
    uint64_t now = atomic_load(word(r));
    uint32_t lo = (uint32_t)now + 5;
    issue_value((now & 0xffffffff00000000) | lo);
    long n = syscall(SYS_futex, &dummy, FUTEX_WAKE_OP, 1, 1L, (void *)word(r), FUTEX_OP(FUTEX_OP_ADD, 5, FUTEX_OP_CMP_EQ, 0x7ff));
    must(n >= 0, "FUTEX_WAKE_OP");
    written(r);
  }
  watch_end();
  rest(r, 8, "after FUTEX_WAKE_OP");
}

static atomic_int waiter_state;
static void *futex_waiter(void *arg) {
  struct run *r = arg;
  uint32_t v = (uint32_t)watch.vals[1];
  atomic_store(&waiter_state, 1);
  // Returns at once if the word is not v: then it is stale in the kernel's eyes.
  long n = syscall(SYS_futex, (void *)word(r), FUTEX_WAIT, v, NULL, NULL, 0);
  atomic_store(&waiter_state, n == 0 ? 2 : errno == EAGAIN ? 3 : 4);
  return NULL;
}

// A futex word that is the template's, stored to, waited on, and woken.
static void sc_futex_wait(struct run *r) {
  pthread_t th;
  watch_begin(r);
  uint64_t was = atomic_load(word(r));
  // It holds what the template has.
  struct timespec z = {0, 1000000};
  if (syscall(SYS_futex, (void *)word(r), FUTEX_WAIT, (uint32_t)was, &z, NULL, 0) != -1 || errno != ETIMEDOUT)
    fail("futex_wait: the word is not what the template has: %s", strerror(errno));
  uint64_t v = issue(r);
  atomic_store(word(r), v);
  written(r);
  if ((uint32_t)was != (uint32_t)v &&
      (syscall(SYS_futex, (void *)word(r), FUTEX_WAIT, (uint32_t)was, &z, NULL, 0) != -1 || errno != EAGAIN))
    fail("futex_wait: the kernel still sees the template's word: %s", strerror(errno));
  atomic_store(&waiter_state, 0);
  must(pthread_create(&th, NULL, futex_waiter, r) == 0, "pthread_create");
  while (!atomic_load(&waiter_state)) sched_yield();
  sleep_ms(2);
  if (atomic_load(&waiter_state) == 3) fail("futex_wait: the kernel sees an old word");
  atomic_store(word(r), issue(r));
  written(r);
  for (int i = 0; atomic_load(&waiter_state) == 1; i++) {
    must(syscall(SYS_futex, (void *)word(r), FUTEX_WAKE, 1, NULL, NULL, 0) >= 0, "FUTEX_WAKE");
    if (i > 2000) fail("futex_wait: the waiter does not wake");
    sleep_ms(1);
  }
  pthread_join(th, NULL);
  watch_end();
  rest(r, 8, "after FUTEX_WAIT");
}

static void *pi_locker(void *arg) {
  struct run *r = arg;
  long n = syscall(SYS_futex, (void *)word(r), FUTEX_LOCK_PI, 0, NULL, NULL, 0);
  atomic_store(&waiter_state, n == 0 ? 2 : 4);
  return NULL;
}

// The kernel writes owners of priority-inheriting locks into the word.
static void sc_futex_pi(struct run *r) {
  uint32_t tid = syscall(SYS_gettid);
  pthread_t th;
  watch_begin(r);
  uint64_t hi = atomic_load(word(r)) & 0xffffffff00000000;
  atomic_store(word(r), issue_value(hi));
  written(r);
  issue_value(hi | tid);
  if (syscall(SYS_futex, (void *)word(r), FUTEX_LOCK_PI, 0, NULL, NULL, 0)) {
    atomic_store(&watch.done, 1);
    watch_end();
    unsupported("FUTEX_LOCK_PI");
    return;
  }
  written(r);
  issue_value(hi | tid | FUTEX_WAITERS);
  atomic_store(&waiter_state, 1);
  must(pthread_create(&th, NULL, pi_locker, r) == 0, "pthread_create");
  for (int i = 0; (uint32_t)atomic_load(word(r)) == tid; i++) {
    if (i > 3000) fail("futex_pi: the waiter does not show in the word");
    sleep_ms(1);
  }
  written(r);
  watch_end();
  must(syscall(SYS_futex, (void *)word(r), FUTEX_UNLOCK_PI, 0, NULL, NULL, 0) == 0, "FUTEX_UNLOCK_PI");
  pthread_join(th, NULL);
  if (atomic_load(&waiter_state) != 2) fail("futex_pi: the waiter did not get the lock");
  uint64_t v = atomic_load(word(r));
  if ((uint32_t)v == tid || (v & 0xffffffff00000000) != hi) fail("futex_pi: the word is %016llx", (unsigned long long)v);
  rest(r, 8, "after FUTEX_LOCK_PI");
}

struct robust {
  struct robust *next;
  long off;
  struct robust *pending;
};

static void *robust_dies(void *arg) {
  struct run *r = arg;
  // The list's head and its one node are in the slot too.
  struct robust *head = (struct robust *)slot_page(r->slot, (r->page + 3) % SLOT);
  struct robust *node = (struct robust *)(r->p + (r->off >= 64 ? r->off - 64 : r->off + 64));
  node->next = head;
  head->next = node;
  head->off = (char *)word(r) - (char *)node;
  head->pending = NULL;
  must(syscall(SYS_set_robust_list, head, sizeof *head) == 0, "set_robust_list");
  uint64_t hi = atomic_load(word(r)) & 0xffffffff00000000;
  atomic_store(word(r), issue_value(hi | (uint32_t)syscall(SYS_gettid)));
  written(r);
  issue_value(hi | FUTEX_OWNER_DIED);
  return NULL;
}

// A thread dies with a lock on its robust list: the kernel says so in the word.
static void sc_robust(struct run *r) {
  pthread_t th;
  r->off = 1024;
  watch_begin(r);
  must(pthread_create(&th, NULL, robust_dies, r) == 0, "pthread_create");
  pthread_join(th, NULL);
  for (int i = 0; !(atomic_load(word(r)) & FUTEX_OWNER_DIED); i++) {
    if (i > 3000) fail("robust: the kernel did not mark the lock of a thread that died");
    sleep_ms(1);
  }
  written(r);
  watch_end();
}

static int exits_at_once(void *arg) {
  (void)arg;
  return 0;
}

// The kernel clears a thread's word when it ends, and writes it when it starts.
static void sc_child_tid(struct run *r) {
  uint8_t *stack = map_or_die(16, RW, ANON, -1);
  size_t other = (r->page + 7) % SLOT;
  volatile pid_t *settid = (pid_t *)(slot_page(r->slot, other) + 512);
  uint8_t b[PAGE];
  watch_begin(r);
  uint64_t now = atomic_load(word(r));
  issue_value(now & 0xffffffff00000000);
  pid_t before = *settid;
  int tid = clone(exits_at_once, stack + 16 * PAGE,
                  CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_PARENT_SETTID |
                      CLONE_CHILD_CLEARTID,
                  NULL, settid, NULL, (void *)word(r));
  must(tid > 0, "clone");
  if (*settid != tid) fail("child_tid: clone wrote %d (was %d) for %d", *settid, before, tid);
  for (int i = 0; (uint32_t)atomic_load(word(r)) != 0; i++) {
    if (i > 5000) fail("child_tid: the word of a thread that ended is not cleared");
    struct timespec ts = {0, 1000000};
    syscall(SYS_futex, (void *)word(r), FUTEX_WAIT, (uint32_t)now, &ts, NULL, 0);
  }
  written(r);
  watch_end();
  original(b, r->slot, other);
  memcpy(slot_page(r->slot, other) + 512, b + 512, 4);
  rest(r, 8, "after a thread ended");
  // The stack may be in use for a moment after the word is cleared.
  sleep_ms(1);
  munmap(stack, 16 * PAGE);
}

static volatile int on_alt;
static void alt_handler(int sig, siginfo_t *si, void *uc) {
  uint64_t local[64];
  (void)si;
  for (int i = 0; i < 64; i++) ((volatile uint64_t *)local)[i] = mix(i + sig);
  sched_yield();
  for (int i = 0; i < 64; i++)
    if (((volatile uint64_t *)local)[i] != mix(i + sig)) fail("sigaltstack: a handler's variable changed");
  if (((ucontext_t *)uc)->uc_stack.ss_size != 16 * PAGE) fail("sigaltstack: the frame does not hold the stack");
  on_alt = (uintptr_t)local != 0;
}

// The kernel writes a signal frame to a stack in pages of the template.
static void sc_sigaltstack(struct run *r) {
  uint8_t *lo = slot_page(r->slot, 8);
  stack_t ss = {.ss_sp = lo, .ss_size = 16 * PAGE}, old;
  struct sigaction sa = {.sa_sigaction = alt_handler, .sa_flags = SA_SIGINFO | SA_ONSTACK}, was;
  must(sigaltstack(&ss, &old) == 0, "sigaltstack");
  must(sigaction(SIGUSR1, &sa, &was) == 0, "sigaction");
  volatile uint64_t keep[32];
  for (int i = 0; i < 32; i++) keep[i] = mix(r->slot + i);
  double d = 1.0 / (1 + r->slot);
  for (int k = 0; k < 3; k++) {
    // Only read so far.
    for (size_t i = 8; i < 24 && k == 0; i++) (void)*(volatile uint64_t *)slot_page(r->slot, i);
    on_alt = 0;
    must(syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), SIGUSR1) == 0, "tgkill");
    if (!on_alt) fail("sigaltstack: the handler did not run");
  }
  for (int i = 0; i < 32; i++)
    if (keep[i] != mix(r->slot + i)) fail("sigaltstack: a variable changed across a signal");
  if (d != 1.0 / (1 + r->slot)) fail("sigaltstack: a register changed across a signal");
  must(sigaltstack(&old, NULL) == 0 && sigaction(SIGUSR1, &was, NULL) == 0, "sigaltstack");
  // Frames begin at the top and do not reach far.
  for (size_t k = 0; k < SLOT; k++)
    if (k < 16 || k >= 24) check_page(slot_page(r->slot, k), r->slot, k, 0, 0, "beside an alternate stack");
  uint8_t b[PAGE];
  original(b, r->slot, 23);
  if (!memcmp(b, slot_page(r->slot, 23), PAGE)) fail("sigaltstack: the page below the top holds no frame");
}

struct rseq_area {
  uint32_t cpu_id_start, cpu_id;
  uint64_t cs;
  uint32_t flags, node, mm_cid, end;
} __attribute__((aligned(32)));

extern const ptrdiff_t __rseq_offset __attribute__((weak));
extern const unsigned int __rseq_size __attribute__((weak));

static void *rseq_thread(void *arg) {
  struct run *r = arg;
  // libc has registered its own area.
  if (&__rseq_size && __rseq_size) {
    void *own = (char *)__builtin_thread_pointer() + __rseq_offset;
    if (syscall(SYS_rseq, own, 32, 1 /* UNREGISTER */, 0x53053053)) {
      unsupported("rseq unregister");
      return NULL;
    }
  }
  volatile struct rseq_area *a = (struct rseq_area *)(r->p + 1024);
  if (syscall(SYS_rseq, a, 32, 0, 0x53053053)) {
    unsupported("rseq");
    return NULL;
  }
  for (int k = 0; k < 50; k++) {
    sched_yield();
    unsigned cpu = a->cpu_id;
    if (cpu > 4096) fail("rseq: cpu_id is %#x", cpu);
    if (a->cpu_id_start > 4096) fail("rseq: cpu_id_start is %#x", a->cpu_id_start);
    if (k % 10 == 0) sleep_ms(1);
  }
  syscall(SYS_rseq, a, 32, 1, 0x53053053);
  return NULL;
}

// The kernel writes the processor's number into an area of the thread.
static void sc_rseq(struct run *r) {
  pthread_t th;
  volatile struct rseq_area *a = (struct rseq_area *)(r->p + 1024);
  // A registration wants no critical section; everything else is the template's.
  if (a->cs) a->cs = 0;
  a->flags = 0;
  must(pthread_create(&th, NULL, rseq_thread, r) == 0, "pthread_create");
  pthread_join(th, NULL);
  r->off = 1024;
  rest(r, 32, "after rseq");
}

// ---- scenarios: many threads ---------------------------------------------------------------------

#define ADDERS 4
static struct {
  _Atomic uint64_t *at[16];
  int n;
  long adds;
  atomic_int go;
} adding;

static void *adder(void *arg) {
  uintptr_t me = (uintptr_t)arg;
  while (!atomic_load(&adding.go)) sched_yield();
  for (long i = 0; i < adding.adds; i++) {
    _Atomic uint64_t *c = adding.at[(me + i) % adding.n];
    switch ((me + i) % 3) {
      case 0:
        atomic_fetch_add(c, 1);
        break;
      case 1: {
        uint64_t v = atomic_load(c);
        while (!atomic_compare_exchange_weak(c, &v, v + 1)) {
        }
        break;
      }
      case 2:
        __asm__ volatile("lock; incq %0" : "+m"(*c)::"memory", "cc");
    }
    if (i % 61 == 60) sched_yield();
    if (i % 997 == 996) sleep_ms(1);
  }
  return NULL;
}

// Counters in pages of the template; the first additions race for the copy-up.
static void sc_atomics(struct run *r) {
  pthread_t th[ADDERS];
  uint64_t first[16];
  adding.n = 16;
  adding.adds = 400 + below(&r->g, 3000);
  atomic_store(&adding.go, 0);
  for (int i = 0; i < adding.n; i++) {
    adding.at[i] = (_Atomic uint64_t *)(slot_page(r->slot, (i * 7) % SLOT) + r->off);
    first[i] = atomic_load(adding.at[i]);
  }
  for (uintptr_t i = 0; i < ADDERS; i++) must(pthread_create(&th[i], NULL, adder, (void *)i) == 0, "pthread_create");
  atomic_store(&adding.go, 1);
  for (int i = 0; i < ADDERS; i++) pthread_join(th[i], NULL);
  uint64_t sum = 0;
  for (int i = 0; i < adding.n; i++) sum += atomic_load(adding.at[i]) - first[i];
  if (sum != (uint64_t)adding.adds * ADDERS) fail("atomics: %llu of %llu additions are there", (unsigned long long)sum,
                                                   (unsigned long long)adding.adds * ADDERS);
  for (size_t k = 0; k < SLOT; k++) check_page(slot_page(r->slot, k), r->slot, k, r->off, 8, "beside counters");
}

// One counter, all threads at once, from the first addition on, and the kernel
// adding too.
static void sc_first_add(struct run *r) {
  pthread_t th[ADDERS];
  int dummy = 0;
  adding.n = 1;
  adding.adds = 20;
  adding.at[0] = word(r);
  atomic_store(&adding.go, 0);
  watch_begin(r);  // maps it
  watch_end();
  uint64_t first = atomic_load(word(r));
  for (uintptr_t i = 0; i < ADDERS; i++) must(pthread_create(&th[i], NULL, adder, (void *)i) == 0, "pthread_create");
  sched_yield();
  atomic_store(&adding.go, 1);
  long kernel = 0;
  for (; kernel < 20; kernel++)
    must(syscall(SYS_futex, &dummy, FUTEX_WAKE_OP, 1, 1L, (void *)word(r), FUTEX_OP(FUTEX_OP_ADD, 1, FUTEX_OP_CMP_EQ, 0x7ff)) >= 0,
         "FUTEX_WAKE_OP");
  for (int i = 0; i < ADDERS; i++) pthread_join(th[i], NULL);
  // The kernel's additions wrap at 32 bits; the word was not near that.
  uint64_t sum = atomic_load(word(r)) - first, all = adding.adds * ADDERS + kernel;
  if (sum != all && (uint32_t)first < 0xffff0000)
    fail("first_add: %llu of %llu additions are there", (unsigned long long)sum, (unsigned long long)all);
  rest(r, 8, "beside a counter");
}

struct slice {
  struct run *r;
  int me;
};
static void *slice_writer(void *arg) {
  struct slice *s = arg;
  struct run *r = s->r;
  while (!atomic_load(&adding.go)) sched_yield();
  // Each thread has every fourth word of every page of the slot.
  for (int round = 1; round <= 3; round++)
    for (size_t k = 0; k < SLOT; k++) {
      size_t page = (k * 5 + s->me * 8) % SLOT;
      uint64_t *w = (uint64_t *)slot_page(r->slot, page);
      for (size_t i = s->me; i < 512; i += ADDERS * 8) ((volatile uint64_t *)w)[i] = mix(round ^ (page << 8) ^ (i << 20));
    }
  return NULL;
}

// Threads write to interleaved words of the same pages: no write may get lost
// when one of them makes the page its own.
static void sc_interleaved(struct run *r) {
  pthread_t th[ADDERS];
  struct slice s[ADDERS];
  check_slot(r->slot, "before interleaved stores");
  atomic_store(&adding.go, 0);
  for (int i = 0; i < ADDERS; i++) {
    s[i] = (struct slice){r, i};
    must(pthread_create(&th[i], NULL, slice_writer, &s[i]) == 0, "pthread_create");
  }
  atomic_store(&adding.go, 1);
  for (int i = 0; i < ADDERS; i++) pthread_join(th[i], NULL);
  for (size_t k = 0; k < SLOT; k++) {
    uint64_t w[512];
    original((uint8_t *)w, r->slot, k);
    for (int t = 0; t < ADDERS; t++)
      for (size_t i = t; i < 512; i += ADDERS * 8) w[i] = mix(3 ^ (k << 8) ^ (i << 20));
    const volatile uint64_t *got = (uint64_t *)slot_page(r->slot, k);
    for (size_t i = 0; i < 512; i++)
      if (got[i] != w[i]) fail("interleaved: slot %zu page %zu word %zu: want %016llx got %016llx", r->slot, k, i,
                               (unsigned long long)w[i], (unsigned long long)got[i]);
  }
}

// A thread maps the template by reading near a page while the kernel, or another
// thread, writes to it: when both are done, the page must not be the template's.
static struct {
  atomic_int turn, done;
  volatile uint8_t *touch;
  int end;
  long delay;
} racing;

static void spin(long n) {
  for (volatile long i = 0; i < n; i++) {
  }
}

static void *race_reader(void *arg) {
  (void)arg;
  for (int turn = 1;; turn++) {
    for (int n = 0; atomic_load(&racing.turn) < turn; n++)
      if (n > 5000) sched_yield();
    if (racing.end) return NULL;
    spin(racing.delay);
    (void)*racing.touch;
    atomic_store(&racing.done, turn);
  }
}

static void race(struct run *r, int how) {
  pthread_t th;
  int p[2];
  uint8_t *s = slot_page(r->slot, 0);
  must(pipe(p) == 0, "pipe");
  atomic_store(&racing.turn, 0);
  atomic_store(&racing.done, 0);
  racing.end = 0;
  must(pthread_create(&th, NULL, race_reader, NULL) == 0, "pthread_create");
  check_slot(r->slot, "before a race");
  for (size_t k = SLOT - 2, turn = 1; k >= 1; k--, turn++) {
    volatile uint64_t *w = (uint64_t *)(s + k * PAGE + r->off);
    uint64_t was = *w, v = fresh(r), got;
    // Unmaps the slot, and changes nothing else. The kernel's access to a page
    // beyond those that are raced for makes it ready to access all.
    must(mprotect(s, SLOT * PAGE, PROT_NONE) == 0 && mprotect(s, SLOT * PAGE, RW) == 0, "mprotect");
    must(write(p[1], s + (SLOT - 1) * PAGE, 1) == 1 && read(p[0], &got, 1) == 1, "pipe");
    if (how == 0) must(write(p[1], &v, 8) == 8, "write");
    racing.touch = s + (k - 1) * PAGE + r->off;
    racing.delay = below(&r->g, 2) ? 0 : below(&r->g, 3000);
    long mine = below(&r->g, 2) ? 0 : below(&r->g, 3000);
    atomic_store(&racing.turn, (int)turn);
    spin(mine);
    switch (how) {
      case 0:
        must(read(p[0], (void *)w, 8) == 8, "read");
        break;
      case 1:
        must(ask_helper(T_VMWRITE, (void *)w, &v, 0), "process_vm_writev");
        break;
      case 2:
        *w = v;
        break;
    }
    got = *w;
    want(r, got, v, "the writer of a page that was being mapped");
    while (atomic_load(&racing.done) < (int)turn) {
      want(r, *w, v, "the writer of a page that was being mapped");
      sched_yield();
    }
    for (int i = 0; i < 50; i++) want(r, *w, v, "a page that was being mapped while it was written to");
    if (k % 3 == 0) *w = was;
  }
  racing.end = 1;
  atomic_store(&racing.turn, SLOT);
  pthread_join(th, NULL);
  close(p[0]);
  close(p[1]);
  for (size_t k = 0; k < SLOT; k++)
    check_page(s + k * PAGE, r->slot, k, k % 3 && k < SLOT - 1 ? r->off : 0, k % 3 && k < SLOT - 1 ? 8 : 0, "after races");
}
static void sc_race_read(struct run *r) { race(r, 0); }
static void sc_race_vmwrite(struct run *r) { race(r, 1); }
static void sc_race_store(struct run *r) { race(r, 2); }

// ---- scenarios: shared memory is copied, not mapped --------------------------------------------------

static void sc_shared(struct run *r) {
  size_t page = below(&r->g, SHARED_PAGES), off = page * PAGE + r->off;
  volatile uint64_t *w = (uint64_t *)(shared + off);
  uint64_t v = *w, got = 0;
  dirty[r->slot] = 0;
  must(ask_helper(T_LOAD, NULL, &got, off), "load");
  want(r, got, v, "another process loads what the template has");
  for (int k = 0; k < 6; k++) {
    v = fresh(r);
    switch ((k + r->slot) % 4) {
      case 0:
        *w = v;
        break;
      case 1:
        must(ask_helper(T_STORE, NULL, &v, off), "store");
        break;
      case 2:
        must(pwrite(shared_fd, &v, 8, off) == 8, "pwrite");
        break;
      case 3:
        must(ask_helper(T_PWRITE, NULL, &v, off), "pwrite");
        break;
    }
    want(r, *w, v, "a load of shared memory");
    must(pread(shared_fd, &got, 8, off) == 8, "pread");
    want(r, got, v, "a pread of shared memory");
    must(ask_helper(T_LOAD, NULL, &got, off), "load");
    want(r, got, v, "a load of shared memory by another process");
    must(ask_helper(T_PREAD, NULL, &got, off), "pread");
    want(r, got, v, "a pread by another process");
  }
  uint64_t o = mix(seed ^ off);
  *w = o;
}

// A private mapping of a file: what was not written to follows the file.
static void sc_private_file(struct run *r) {
  size_t page = below(&r->g, SHARED_PAGES - 2);
  dirty[r->slot] = 0;
  // Two mappings: a write may copy neighbours of its page too.
  uint8_t *m = mmap(NULL, PAGE, RW, MAP_PRIVATE, shared_fd, page * PAGE);
  uint8_t *m2 = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, shared_fd, (page + 1) * PAGE);
  must(m != MAP_FAILED && m2 != MAP_FAILED, "mmap");
  volatile uint64_t *w = (uint64_t *)(m + r->off), *w2 = (uint64_t *)(m2 + r->off);
  volatile uint64_t *f = (uint64_t *)(shared + page * PAGE + r->off), *f2 = (uint64_t *)(shared + (page + 1) * PAGE + r->off);
  uint64_t was = *f;
  want(r, *w, was, "a private mapping of a file");
  uint64_t v = fresh(r), u = fresh(r);
  *w = v;
  want(r, *w, v, "a private mapping that was written to");
  want(r, *f, was, "the file below a private mapping that was written to");
  uint64_t was2 = *f2;
  want(r, *w2, was2, "a private mapping of a file");
  *f2 = u;
  want(r, *w2, u, "a private mapping that was not written to");
  *f2 = was2;
  want(r, *w2, was2, "a private mapping that was not written to");
  must(munmap(m, PAGE) == 0 && munmap(m2, PAGE) == 0, "munmap");
}

// ---- stacks and heap ------------------------------------------------------------------------------------

// A stack that was deep when the checkpoint was taken: its pages are the
// template's, and frames are written over them.
static uint64_t dive(int depth, uint64_t h) {
  volatile uint64_t frame[200];
  for (int i = 0; i < 200; i++) frame[i] = h + i;
  uint64_t below_me = depth ? dive(depth - 1, mix(h)) : 0;
  for (int i = 0; i < 200; i++)
    if (frame[i] != h + i) fail("stack: a variable changed: want %016llx got %016llx", (unsigned long long)h + i,
                                (unsigned long long)frame[i]);
  return mix(below_me ^ h);
}

static void *dive_thread(void *arg) {
  uint64_t *h = arg;
  *h = dive(60, *h);
  return NULL;
}

static void sc_stack(struct run *r) {
  dirty[r->slot] = 0;
  uint64_t h = rnd(&r->g), a = h;
  pthread_t th;
  pthread_attr_t at;
  must(pthread_create(&th, NULL, dive_thread, &a) == 0, "pthread_create");
  uint64_t b = dive(60, h);
  pthread_join(th, NULL);
  want(r, a, b, "two dives");
  // A thread whose whole stack is a slot.
  size_t slot = r->slot;
  dirty[slot] = 1;
  check_slot(slot, "before it is a stack");
  a = h;
  must(pthread_attr_init(&at) == 0 && pthread_attr_setstack(&at, slot_page(slot, 0), SLOT * PAGE) == 0, "pthread_attr_setstack");
  must(pthread_create(&th, &at, dive_thread, &a) == 0, "pthread_create");
  pthread_join(th, NULL);
  want(r, a, dive(60, h), "a dive on a stack of the template");
}

static uint8_t *heap_low;
#define HEAP_PAGES 512

static void sc_brk(struct run *r) {
  dirty[r->slot] = 0;
  // The heap's own pages; the top is given back and taken again.
  size_t page = below(&r->g, HEAP_PAGES - 64);
  volatile uint64_t *w = (uint64_t *)(heap_low + page * PAGE + r->off);
  uint64_t was = *w, v = fresh(r);
  want(r, was, mix(seed ^ page ^ (r->off << 8)), "the heap");
  *w = v;
  want(r, *w, v, "the heap after a store");
  *w = was;
  uint8_t *top = sbrk(0);
  if (top != heap_low + HEAP_PAGES * PAGE) return;  // libc took some
  must(sbrk(-32 * (long)PAGE) != (void *)-1, "sbrk");
  if (access_signal(top - PAGE, 0) != SIGSEGV) fail("brk: what was given back can be read");
  must(sbrk(32 * PAGE) != (void *)-1, "sbrk");
  if (!all_zero(top - 32 * PAGE, 32 * PAGE)) fail("brk: what was taken again is not zero");
}

// ---- the list --------------------------------------------------------------------------------------------

static const struct {
  const char *name;
  void (*f)(struct run *);
} scenarios[] = {
    {"store", sc_store},       {"read", sc_read},           {"pread", sc_pread},
    {"recv", sc_recv},         {"readv", sc_readv},         {"preadv", sc_preadv},
    {"bigread", sc_bigread},   {"vmwrite", sc_vmwrite},     {"procmem", sc_procmem},
    {"poke", sc_poke},         {"selfmem", sc_selfmem},     {"readers", sc_readers},
    {"results", sc_results},   {"iovec", sc_iovec},         {"fork_child", sc_fork_child},
    {"fork_parent", sc_fork_parent}, {"fork_unique", sc_fork_unique}, {"fork_remote", sc_fork_remote},
    {"cow_kernel", sc_cow_kernel}, {"pause", sc_pause}, {"busy", sc_busy}, {"race_read", sc_race_read},
    {"race_vmwrite", sc_race_vmwrite}, {"race_store", sc_race_store},
    {"vfork", sc_vfork},       {"mremap", sc_mremap},       {"mremap_part", sc_mremap_part},
    {"mprotect", sc_mprotect}, {"jit", sc_jit},             {"dontneed", sc_dontneed},
    {"mapfixed", sc_mapfixed}, {"split", sc_split},         {"mlock", sc_mlock},
    {"futex_op", sc_futex_op}, {"futex_wait", sc_futex_wait}, {"futex_pi", sc_futex_pi},
    {"robust", sc_robust},     {"child_tid", sc_child_tid}, {"sigaltstack", sc_sigaltstack},
    {"rseq", sc_rseq},         {"atomics", sc_atomics},     {"first_add", sc_first_add},
    {"interleaved", sc_interleaved}, {"shared", sc_shared}, {"private_file", sc_private_file},
    {"stack", sc_stack},       {"brk", sc_brk},
};
#define NSCENARIOS (sizeof scenarios / sizeof scenarios[0])

static struct rng order;

static void run(const char *name, long n) {
  size_t s = 0;
  while (s < NSCENARIOS && strcmp(scenarios[s].name, name)) s++;
  if (s == NSCENARIOS) fail("unknown scenario %s", name);
  while (n-- > 0) {
    struct run r = {.g = {rnd(&order)}, .name = scenarios[s].name};
    take(&r);
    scenarios[s].f(&r);
  }
}

// reset makes all slots what the template has. Those that were mapped anew have
// other pages of the memory file, which are stored like any others.
static size_t reset(void) {
  size_t n = 0;
  for (size_t s = 0; s < slots; s++) {
    if (!dirty[s]) continue;
    for (size_t k = 0; k < SLOT; k++) original(slot_page(s, k), s, k);
    dirty[s] = 0;
    n++;
  }
  return n;
}

int main(int argc, char **argv) {
  prog_name = "hazard";
  if (argc > 1 && !strcmp(argv[1], "--exit")) return 0;
  if (argc > 1 && !strcmp(argv[1], "--wait")) {
    duo_step(opt_num(argc, argv, "out", 1), 1);
    duo_step(opt_num(argc, argv, "in", 0), 0);
    return 0;
  }
  seed = opt_num(argc, argv, "seed", 1);
  slots = opt_num(argc, argv, "slots", 512);
  order.s = seed;
  main_pid = getpid();
  must(chdir("/") == 0, "chdir");
  install_fault_handlers();
  signal(SIGPIPE, SIG_IGN);
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);

  box = map_or_die(1, RW, MAP_SHARED | MAP_ANONYMOUS, -1);
  victim = (atomic_int *)((char *)box + 2048);
  shared_fd = syscall(SYS_memfd_create, "shared", 0);
  must(shared_fd >= 0 && ftruncate(shared_fd, SHARED_PAGES * PAGE) == 0, "memfd_create");
  shared = map_or_die(SHARED_PAGES, RW, MAP_SHARED, shared_fd);
  for (size_t i = 0; i < SHARED_PAGES * 512; i++) ((uint64_t *)shared)[i] = mix(seed ^ (i * 8));
  helper_pid = fork();
  must(helper_pid >= 0, "fork");
  if (helper_pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    helper_loop();
  }

  heap_low = sbrk(0);
  heap_low += -(uintptr_t)heap_low & (PAGE - 1);
  must(brk(heap_low + HEAP_PAGES * PAGE) == 0, "brk");
  for (size_t p = 0; p < HEAP_PAGES; p++)
    for (size_t o = 0; o < PAGE; o += 8) *(uint64_t *)(heap_low + p * PAGE + o) = mix(seed ^ p ^ (o << 8));

  area = map_or_die(slots * SLOT, RW, ANON | MAP_POPULATE, -1);
  dirty = calloc(slots, 1);
  must(dirty, "calloc");
  for (size_t s = 0; s < slots; s++)
    for (size_t k = 0; k < SLOT; k++) original(slot_page(s, k), s, k);
  dive(200, 1);
  pthread_t th;
  static char a[] = "a spinner", b[] = "the other spinner";
  must(pthread_create(&th, NULL, spinner, a) == 0, "pthread_create");
  must(pthread_create(&th, NULL, spinner, b) == 0, "pthread_create");
  must(pthread_create(&th, NULL, victim_main, NULL) == 0, "pthread_create");
  while (!atomic_load(victim)) sleep_ms(1);

  setvbuf(stdout, NULL, _IOLBF, 0);
  puts("READY");
  char line[256], name[64];
  long n;
  while (fgets(line, sizeof line, stdin)) {
    line[strcspn(line, "\n")] = 0;
    if (!strcmp(line, "list")) {
      printf("OK list");
      for (size_t i = 0; i < NSCENARIOS; i++) printf(" %s", scenarios[i].name);
      printf("\n");
    } else if (sscanf(line, "run %60s %ld", name, &n) == 2) {
      int64_t t = now_ns();
      run(name, n);
      printf("OK run %s %ld in %lld ms, unsupported: %s\n", name, n, (long long)(now_ns() - t) / 1000000, unsupported_list());
    } else if (!strcmp(line, "reset")) {
      printf("OK reset %zu\n", reset());
    } else if (!strcmp(line, "verify")) {
      size_t v = 0;
      for (size_t s = 0; s < slots; s++)
        if (!dirty[s]) {
          check_slot(s, "verify");
          v++;
        }
      printf("OK verify %zu\n", v);
    } else if (!strcmp(line, "quit")) {
      break;
    } else {
      fail("unknown request %s", line);
    }
  }
  atomic_store(&box->task, T_QUIT);
  syscall(SYS_futex, &box->task, FUTEX_WAKE, 1, NULL, NULL, 0);
  waitpid(helper_pid, NULL, 0);
  return 0;
}
