// blocking waits in every blocking call there is, over and over, while memory
// is evicted around it, and asserts what an application may rely on: no EINTR
// without a signal, no sleep that ends early, no wake that gets lost, no wait
// that outlasts its end by more than a generous bound. The arguments and
// buffers of each call lie in pages of their own that go cold while it waits.
//
//   blocking --seconds=20 --mb=24
//
// Rounds alternate between two shapes: all calls wait for the same time
// together, so that the sandbox is idle and an idle-triggered pass runs in the
// middle of every call; and each call loops on its own with random times.
//
// One JSON line per call says how late it returned; the test compares that
// with the same run under a stock runtime.

#include "guest.h"

#include <linux/aio_abi.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <poll.h>
#include <semaphore.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/msg.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/un.h>

// How much early is still not early: the guest reads its clock through the
// vDSO, the sentry times the wait on its own, and the two may differ a little.
#define EARLY_NS 2000000LL

static int64_t max_late_ns;

// One page of arguments and one of data, cold by the time they are used again.
struct cold {
  struct timespec ts;
  struct timeval tv;
  struct epoll_event ev[16];
  struct pollfd pfd[8];
  fd_set set;
  siginfo_t si;
  struct sembuf sb;
  atomic_int word;
  struct io_event ioev;
};

struct wait {
  const char *name;
  int wakes;  // woken by another thread rather than by time
  void (*init)(struct wait *);
  void (*block)(struct wait *, long ms);
  void (*wake)(struct wait *);

  pthread_t th, waker;
  struct cold *c;
  uint8_t *data;
  int fd[4];
  int id;
  pid_t tid;
  struct rng g;
  sem_t arm;
  pthread_mutex_t mu;
  pthread_cond_t cond;
  aio_context_t aio;
  atomic_long arm_ms;
  atomic_llong woke_at;
  atomic_llong due;  // when the present wait has to be over; 0 between waits
  int64_t *late;
  size_t nlate;
  uint64_t seq;
};

#define MAXLATE 20000

static pthread_barrier_t barrier;
static atomic_int mode;  // 0: on its own, 1: together, 2: stop
static atomic_long together_ms;
static atomic_llong free_until;
static atomic_llong *together_until;  // shared with the process that waits for signals

static void no_eintr(struct wait *w, const char *what) {
  if (errno == EINTR) fail("%s: EINTR from %s although no signal was sent", w->name, what);
  die(what);
}

static struct timespec *rel(struct wait *w, long ms) {
  w->c->ts = (struct timespec){ms / 1000, ms % 1000 * 1000000};
  return &w->c->ts;
}

static struct timespec *abs_time(struct wait *w, clockid_t id, long ms) {
  clock_gettime(id, &w->c->ts);
  w->c->ts.tv_nsec += ms % 1000 * 1000000;
  w->c->ts.tv_sec += ms / 1000 + w->c->ts.tv_nsec / 1000000000;
  w->c->ts.tv_nsec %= 1000000000;
  return &w->c->ts;
}

// ---- calls that end by time -------------------------------------------------

static void init_pipe(struct wait *w) { must(pipe(w->fd) == 0, "pipe"); }

static void init_unix(struct wait *w) {
  must(socketpair(AF_UNIX, SOCK_STREAM, 0, w->fd) == 0, "socketpair");
}

static void init_udp(struct wait *w) {
  struct sockaddr_in sa = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t len = sizeof sa;
  w->fd[0] = socket(AF_INET, SOCK_DGRAM, 0);
  w->fd[1] = socket(AF_INET, SOCK_DGRAM, 0);
  must(w->fd[0] >= 0 && w->fd[1] >= 0, "socket");
  must(bind(w->fd[0], (void *)&sa, sizeof sa) == 0, "bind");
  must(getsockname(w->fd[0], (void *)&sa, &len) == 0, "getsockname");
  must(connect(w->fd[1], (void *)&sa, sizeof sa) == 0, "connect");
}

static void init_tcp_listen(struct wait *w) {
  struct sockaddr_in sa = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  w->fd[0] = socket(AF_INET, SOCK_STREAM, 0);
  must(w->fd[0] >= 0 && bind(w->fd[0], (void *)&sa, sizeof sa) == 0 && listen(w->fd[0], 8) == 0,
       "listen");
}

static void init_tcp(struct wait *w) {
  struct sockaddr_in sa;
  socklen_t len = sizeof sa;
  init_tcp_listen(w);
  must(getsockname(w->fd[0], (void *)&sa, &len) == 0, "getsockname");
  w->fd[1] = socket(AF_INET, SOCK_STREAM, 0);
  must(w->fd[1] >= 0 && connect(w->fd[1], (void *)&sa, sizeof sa) == 0, "connect");
  int c = accept(w->fd[0], NULL, NULL);
  must(c >= 0 && close(w->fd[0]) == 0, "accept");
  w->fd[0] = c;
}

static void init_epoll(struct wait *w) {
  init_pipe(w);
  w->fd[2] = epoll_create1(0);
  w->fd[3] = eventfd(0, EFD_NONBLOCK);
  must(w->fd[2] >= 0 && w->fd[3] >= 0, "epoll_create1");
  for (int i = 0; i < 2; i++) {
    w->c->ev[0] = (struct epoll_event){.events = EPOLLIN, .data.u64 = 7 + i};
    must(epoll_ctl(w->fd[2], EPOLL_CTL_ADD, i ? w->fd[3] : w->fd[0], &w->c->ev[0]) == 0, "epoll_ctl");
  }
}

static void init_eventfd(struct wait *w) {
  w->fd[0] = eventfd(0, 0);
  must(w->fd[0] >= 0, "eventfd");
}

static void init_sem(struct wait *w) {
  w->id = semget(IPC_PRIVATE, 1, IPC_CREAT | 0600);
  must(w->id >= 0, "semget");
}

static void init_msg(struct wait *w) {
  w->id = msgget(IPC_PRIVATE, IPC_CREAT | 0600);
  must(w->id >= 0, "msgget");
}

static void init_timerfd(struct wait *w) {
  w->fd[0] = timerfd_create(CLOCK_MONOTONIC, 0);
  must(w->fd[0] >= 0, "timerfd_create");
}

static void init_aio(struct wait *w) {
  if (syscall(SYS_io_setup, 4, &w->aio) != 0) {
    w->aio = 0;
    unsupported("aio");
  }
}

static void block_poll(struct wait *w, long ms) {
  w->c->pfd[0] = (struct pollfd){.fd = w->fd[0], .events = POLLIN};
  int r = poll(w->c->pfd, 1, ms);
  if (r < 0) no_eintr(w, "poll");
  if (r != 0) fail("poll returned %d", r);
}

static void block_ppoll(struct wait *w, long ms) {
  w->c->pfd[0] = (struct pollfd){.fd = w->fd[0], .events = POLLIN};
  int r = ppoll(w->c->pfd, 1, rel(w, ms), NULL);
  if (r < 0) no_eintr(w, "ppoll");
  if (r != 0) fail("ppoll returned %d", r);
}

static void block_select(struct wait *w, long ms) {
  FD_ZERO(&w->c->set);
  FD_SET(w->fd[0], &w->c->set);
  w->c->tv = (struct timeval){ms / 1000, ms % 1000 * 1000};
  int r = select(w->fd[0] + 1, &w->c->set, NULL, NULL, &w->c->tv);
  if (r < 0) no_eintr(w, "select");
  if (r != 0) fail("select returned %d", r);
}

static void block_pselect(struct wait *w, long ms) {
  FD_ZERO(&w->c->set);
  FD_SET(w->fd[0], &w->c->set);
  int r = pselect(w->fd[0] + 1, &w->c->set, NULL, NULL, rel(w, ms), NULL);
  if (r < 0) no_eintr(w, "pselect");
  if (r != 0) fail("pselect returned %d", r);
}

static void block_epoll(struct wait *w, long ms) {
  int r = epoll_wait(w->fd[2], w->c->ev, 16, ms);
  if (r < 0) no_eintr(w, "epoll_wait");
  if (r != 0) fail("epoll_wait returned %d", r);
}

static void block_epoll_pwait2(struct wait *w, long ms) {
  int r = syscall(SYS_epoll_pwait2, w->fd[2], w->c->ev, 16, rel(w, ms), NULL, 0);
  if (r < 0 && errno == ENOSYS) {
    unsupported("epoll_pwait2");
    sleep_ms(ms);
    return;
  }
  if (r < 0) no_eintr(w, "epoll_pwait2");
  if (r != 0) fail("epoll_pwait2 returned %d", r);
}

static void block_nanosleep(struct wait *w, long ms) {
  if (nanosleep(rel(w, ms), NULL) < 0) no_eintr(w, "nanosleep");
}

static void block_clock_nanosleep(struct wait *w, long ms) {
  int e = clock_nanosleep(CLOCK_MONOTONIC, 0, rel(w, ms), NULL);
  if (e) fail("clock_nanosleep: %s", strerror(e));
}

static void block_clock_nanosleep_abs(struct wait *w, long ms) {
  int e = clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, abs_time(w, CLOCK_MONOTONIC, ms), NULL);
  if (e) fail("clock_nanosleep(ABSTIME): %s", strerror(e));
}

static void block_clock_nanosleep_real(struct wait *w, long ms) {
  int e = clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, abs_time(w, CLOCK_REALTIME, ms), NULL);
  if (e) fail("clock_nanosleep(REALTIME): %s", strerror(e));
}

static void expect_timeout(struct wait *w, long r, int want, const char *what) {
  if (r >= 0) fail("%s returned %ld, want a timeout", what, r);
  if (errno != want) no_eintr(w, what);
}

static void block_futex(struct wait *w, long ms) {
  long r = syscall(SYS_futex, &w->c->word, FUTEX_WAIT, 0, rel(w, ms), NULL, 0);
  expect_timeout(w, r, ETIMEDOUT, "futex");
}

static void block_futex_private(struct wait *w, long ms) {
  long r = syscall(SYS_futex, &w->c->word, FUTEX_WAIT_BITSET | FUTEX_PRIVATE_FLAG, 0,
                   abs_time(w, CLOCK_MONOTONIC, ms), NULL, FUTEX_BITSET_MATCH_ANY);
  expect_timeout(w, r, ETIMEDOUT, "futex bitset");
}

static void rcvtimeo(struct wait *w, int fd, long ms) {
  w->c->tv = (struct timeval){ms / 1000, ms % 1000 * 1000};
  must(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &w->c->tv, sizeof w->c->tv) == 0, "SO_RCVTIMEO");
}

static void block_recv(struct wait *w, long ms) {
  rcvtimeo(w, w->fd[0], ms);
  expect_timeout(w, recv(w->fd[0], w->data, PAGE, 0), EAGAIN, "recv with SO_RCVTIMEO");
}

static void block_sigtimedwait(struct wait *w, long ms) {
  sigset_t s;
  sigemptyset(&s);
  sigaddset(&s, SIGUSR2);
  expect_timeout(w, sigtimedwait(&s, &w->c->si, rel(w, ms)), EAGAIN, "sigtimedwait");
}

static void block_semtimedop(struct wait *w, long ms) {
  w->c->sb = (struct sembuf){0, -1, 0};
  expect_timeout(w, semtimedop(w->id, &w->c->sb, 1, rel(w, ms)), EAGAIN, "semtimedop");
}

static void block_sem_timedwait(struct wait *w, long ms) {
  sem_t *s = (sem_t *)w->data;
  expect_timeout(w, sem_timedwait(s, abs_time(w, CLOCK_REALTIME, ms)), ETIMEDOUT, "sem_timedwait");
}
static void init_posix_sem(struct wait *w) { must(sem_init((sem_t *)w->data, 0, 0) == 0, "sem_init"); }

static void block_cond(struct wait *w, long ms) {
  pthread_mutex_lock(&w->mu);
  int e = pthread_cond_clockwait(&w->cond, &w->mu, CLOCK_MONOTONIC, abs_time(w, CLOCK_MONOTONIC, ms));
  pthread_mutex_unlock(&w->mu);
  if (e != ETIMEDOUT) fail("pthread_cond_clockwait: %s", strerror(e));
}

static void block_timerfd(struct wait *w, long ms) {
  struct itimerspec it = {.it_value = *rel(w, ms)};
  must(timerfd_settime(w->fd[0], 0, &it, NULL) == 0, "timerfd_settime");
  ssize_t r = read(w->fd[0], w->data, 8);
  if (r < 0) no_eintr(w, "timerfd read");
  if (r != 8 || *(uint64_t *)w->data != 1) fail("timerfd read returned %zd", r);
}

static void block_io_getevents(struct wait *w, long ms) {
  if (!w->aio) {
    sleep_ms(ms);
    return;
  }
  long r = syscall(SYS_io_getevents, w->aio, 1L, 1L, &w->c->ioev, rel(w, ms));
  if (r < 0) no_eintr(w, "io_getevents");
  if (r != 0) fail("io_getevents returned %ld", r);
}

// ---- calls that another thread ends ------------------------------------------

static void put(int fd, struct wait *w, size_t n) {
  uint8_t b[PAGE];
  struct page pg = {w->seq, 1, 0, 0};
  page_content(b, &pg);
  must(write(fd, b, n) == (ssize_t)n, "write");
}

static void got(struct wait *w, ssize_t r, size_t n, const char *what) {
  if (r < 0) no_eintr(w, what);
  uint8_t b[PAGE];
  struct page pg = {w->seq, 1, 0, 0};
  page_content(b, &pg);
  if (r != (ssize_t)n || memcmp(b, w->data, n)) fail("%s: %zd bytes, or wrong ones", what, r);
}

static void block_pipe_read(struct wait *w, long ms) {
  (void)ms;
  got(w, read(w->fd[0], w->data, PAGE), PAGE, "pipe read");
}
static void wake_pipe(struct wait *w) { put(w->fd[1], w, PAGE); }

static void block_recv_wake(struct wait *w, long ms) {
  (void)ms;
  got(w, recv(w->fd[0], w->data, 1000, 0), 1000, "recv");
}
static void wake_send(struct wait *w) { put(w->fd[1], w, 1000); }

static void block_eventfd_read(struct wait *w, long ms) {
  (void)ms;
  ssize_t r = read(w->fd[0], w->data, 8);
  if (r < 0) no_eintr(w, "eventfd read");
  if (r != 8 || *(uint64_t *)w->data != w->seq) fail("eventfd read: %zd", r);
}
static void wake_eventfd(struct wait *w) {
  uint64_t v = w->seq;
  must(write(w->fd[0], &v, 8) == 8, "eventfd write");
}

static void block_epoll_wake(struct wait *w, long ms) {
  (void)ms;
  int r = epoll_wait(w->fd[2], w->c->ev, 16, -1);
  if (r < 0) no_eintr(w, "epoll_wait");
  if (r != 1 || w->c->ev[0].data.u64 != 8) fail("epoll_wait returned %d", r);
  must(read(w->fd[3], w->data, 8) == 8, "eventfd read");
}
static void wake_epoll(struct wait *w) {
  uint64_t v = 1;
  must(write(w->fd[3], &v, 8) == 8, "eventfd write");
}

static void block_poll_wake(struct wait *w, long ms) {
  (void)ms;
  w->c->pfd[0] = (struct pollfd){.fd = w->fd[0], .events = POLLIN};
  int r = poll(w->c->pfd, 1, -1);
  if (r < 0) no_eintr(w, "poll");
  if (r != 1 || !(w->c->pfd[0].revents & POLLIN)) fail("poll returned %d", r);
  got(w, read(w->fd[0], w->data, PAGE), PAGE, "read after poll");
}

static void block_futex_wake(struct wait *w, long ms) {
  (void)ms;
  while (atomic_load(&w->c->word) == 0) {
    long r = syscall(SYS_futex, &w->c->word, FUTEX_WAIT, 0, NULL, NULL, 0);
    if (r < 0 && errno != EAGAIN) no_eintr(w, "futex");
  }
  atomic_store(&w->c->word, 0);
}
static void wake_futex(struct wait *w) {
  atomic_store(&w->c->word, 1);
  syscall(SYS_futex, &w->c->word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void block_semop(struct wait *w, long ms) {
  (void)ms;
  w->c->sb = (struct sembuf){0, -1, 0};
  if (semop(w->id, &w->c->sb, 1) < 0) no_eintr(w, "semop");
}
static void wake_semop(struct wait *w) {
  struct sembuf sb = {0, 1, 0};
  must(semop(w->id, &sb, 1) == 0, "semop");
}

struct msg {
  long type;
  uint8_t text[2000];
};

static void block_msgrcv(struct wait *w, long ms) {
  (void)ms;
  struct msg *m = (struct msg *)w->data;
  ssize_t r = msgrcv(w->id, m, sizeof m->text, 5, 0);
  if (r < 0) no_eintr(w, "msgrcv");
  uint8_t b[PAGE];
  struct page pg = {w->seq, 1, 0, 0};
  page_content(b, &pg);
  if (r != (ssize_t)sizeof m->text || m->type != 5 || memcmp(b, m->text, sizeof m->text))
    fail("msgrcv: %zd bytes, or wrong ones", r);
}
static void wake_msgsnd(struct wait *w) {
  struct msg m = {.type = 5};
  uint8_t b[PAGE];
  struct page pg = {w->seq, 1, 0, 0};
  page_content(b, &pg);
  memcpy(m.text, b, sizeof m.text);
  must(msgsnd(w->id, &m, sizeof m.text, 0) == 0, "msgsnd");
}

static void block_sigwait(struct wait *w, long ms) {
  (void)ms;
  sigset_t s;
  sigemptyset(&s);
  sigaddset(&s, SIGUSR1);
  int r = sigwaitinfo(&s, &w->c->si);
  if (r < 0) no_eintr(w, "sigwaitinfo");
  if (r != SIGUSR1) fail("sigwaitinfo returned %d", r);
}
static void wake_tgkill(struct wait *w) {
  must(syscall(SYS_tgkill, getpid(), w->tid, SIGUSR1) == 0, "tgkill");
}

static void init_signalfd(struct wait *w) {
  sigset_t s;
  sigemptyset(&s);
  sigaddset(&s, SIGUSR1);
  w->fd[0] = signalfd(-1, &s, 0);
  must(w->fd[0] >= 0, "signalfd");
}
static void block_signalfd(struct wait *w, long ms) {
  (void)ms;
  struct signalfd_siginfo *si = (void *)w->data;
  ssize_t r = read(w->fd[0], si, sizeof *si);
  if (r < 0) no_eintr(w, "signalfd read");
  if (r != sizeof *si || si->ssi_signo != SIGUSR1) fail("signalfd read: %zd", r);
}

static void block_accept_wake(struct wait *w, long ms) {
  (void)ms;
  int c = accept(w->fd[0], NULL, NULL);
  if (c < 0) no_eintr(w, "accept");
  close(c);
}
static void wake_connect(struct wait *w) {
  struct sockaddr_in sa;
  socklen_t len = sizeof sa;
  must(getsockname(w->fd[0], (void *)&sa, &len) == 0, "getsockname");
  int c = socket(AF_INET, SOCK_STREAM, 0);
  must(c >= 0 && connect(c, (void *)&sa, sizeof sa) == 0, "connect");
  close(c);
}

static void block_cond_wake(struct wait *w, long ms) {
  (void)ms;
  pthread_mutex_lock(&w->mu);
  while (!w->c->word) pthread_cond_wait(&w->cond, &w->mu);
  w->c->word = 0;
  pthread_mutex_unlock(&w->mu);
}
static void wake_cond(struct wait *w) {
  pthread_mutex_lock(&w->mu);
  w->c->word = 1;
  pthread_cond_signal(&w->cond);
  pthread_mutex_unlock(&w->mu);
}

static void block_waitpid(struct wait *w, long ms) {
  (void)w;
  int st;
  pid_t pid = fork();
  must(pid >= 0, "fork");
  if (pid == 0) {
    sleep_ms(ms);
    _exit(7);
  }
  if (waitpid(pid, &st, 0) < 0) no_eintr(w, "waitpid");
  if (!WIFEXITED(st) || WEXITSTATUS(st) != 7) fail("waitpid: status %#x", st);
}

static void init_flock(struct wait *w) {
  char name[64];
  snprintf(name, sizeof name, "/dev/shm/blocking-%d-%p", getpid(), (void *)w);
  w->fd[0] = open(name, O_RDWR | O_CREAT, 0600);
  w->fd[1] = open(name, O_RDWR);
  must(w->fd[0] >= 0 && w->fd[1] >= 0 && unlink(name) == 0, name);
}
static void block_flock(struct wait *w, long ms) {
  (void)ms;
  if (flock(w->fd[0], LOCK_EX) < 0) no_eintr(w, "flock");
  must(flock(w->fd[0], LOCK_UN) == 0, "flock");
}
static void arm_flock(struct wait *w) { must(flock(w->fd[1], LOCK_EX) == 0, "flock"); }
static void wake_flock(struct wait *w) { must(flock(w->fd[1], LOCK_UN) == 0, "flock"); }

static struct wait waits[] = {
    {.name = "poll", .init = init_pipe, .block = block_poll},
    {.name = "ppoll", .init = init_pipe, .block = block_ppoll},
    {.name = "select", .init = init_pipe, .block = block_select},
    {.name = "pselect", .init = init_pipe, .block = block_pselect},
    {.name = "epoll_wait", .init = init_epoll, .block = block_epoll},
    {.name = "epoll_pwait2", .init = init_epoll, .block = block_epoll_pwait2},
    {.name = "nanosleep", .block = block_nanosleep},
    {.name = "clock_nanosleep", .block = block_clock_nanosleep},
    {.name = "clock_nanosleep_abs", .block = block_clock_nanosleep_abs},
    {.name = "clock_nanosleep_real", .block = block_clock_nanosleep_real},
    {.name = "futex", .block = block_futex},
    {.name = "futex_private", .block = block_futex_private},
    {.name = "recv_unix", .init = init_unix, .block = block_recv},
    {.name = "recv_udp", .init = init_udp, .block = block_recv},
    {.name = "recv_tcp", .init = init_tcp, .block = block_recv},
    {.name = "sigtimedwait", .block = block_sigtimedwait},
    {.name = "semtimedop", .init = init_sem, .block = block_semtimedop},
    {.name = "sem_timedwait", .init = init_posix_sem, .block = block_sem_timedwait},
    {.name = "cond_timedwait", .block = block_cond},
    {.name = "timerfd", .init = init_timerfd, .block = block_timerfd},
    {.name = "io_getevents", .init = init_aio, .block = block_io_getevents},
    {.name = "waitpid", .block = block_waitpid},
    {.name = "pipe_wake", .wakes = 1, .init = init_pipe, .block = block_pipe_read, .wake = wake_pipe},
    {.name = "unix_wake", .wakes = 1, .init = init_unix, .block = block_recv_wake, .wake = wake_send},
    {.name = "udp_wake", .wakes = 1, .init = init_udp, .block = block_recv_wake, .wake = wake_send},
    {.name = "eventfd_wake", .wakes = 1, .init = init_eventfd, .block = block_eventfd_read, .wake = wake_eventfd},
    {.name = "epoll_wake", .wakes = 1, .init = init_epoll, .block = block_epoll_wake, .wake = wake_epoll},
    {.name = "poll_wake", .wakes = 1, .init = init_pipe, .block = block_poll_wake, .wake = wake_pipe},
    {.name = "futex_wake", .wakes = 1, .block = block_futex_wake, .wake = wake_futex},
    {.name = "semop_wake", .wakes = 1, .init = init_sem, .block = block_semop, .wake = wake_semop},
    {.name = "msgrcv_wake", .wakes = 1, .init = init_msg, .block = block_msgrcv, .wake = wake_msgsnd},
    {.name = "sigwait_wake", .wakes = 1, .block = block_sigwait, .wake = wake_tgkill},
    {.name = "signalfd_wake", .wakes = 1, .init = init_signalfd, .block = block_signalfd, .wake = wake_tgkill},
    {.name = "accept_wake", .wakes = 1, .init = init_tcp_listen, .block = block_accept_wake, .wake = wake_connect},
    {.name = "cond_wake", .wakes = 1, .block = block_cond_wake, .wake = wake_cond},
    {.name = "flock_wake", .wakes = 1, .init = init_flock, .block = block_flock, .wake = wake_flock},
};
#define NWAITS (sizeof waits / sizeof waits[0])

// ---- driving ---------------------------------------------------------------

static void *waker_main(void *arg) {
  struct wait *w = arg;
  for (;;) {
    while (sem_wait(&w->arm) < 0) must(errno == EINTR, "sem_wait");
    long ms = atomic_load(&w->arm_ms);
    if (ms < 0) return NULL;
    sleep_ms(ms);
    atomic_store(&w->woke_at, now_ns());
    w->wake(w);
  }
}

static void one_wait(struct wait *w, long ms) {
  w->seq++;
  if (w->wakes) {
    if (w->wake == wake_flock) arm_flock(w);
    atomic_store(&w->woke_at, 0);
    atomic_store(&w->arm_ms, ms);
    must(sem_post(&w->arm) == 0, "sem_post");
  }
  int64_t t0 = now_ns();
  atomic_store(&w->due, t0 + ms * 1000000);
  w->block(w, ms);
  atomic_store(&w->due, 0);
  int64_t t1 = now_ns(), late = t1 - t0 - ms * 1000000;
  if (w->wakes) {
    int64_t at = atomic_load(&w->woke_at);
    if (at == 0) fail("%s: returned after %lld us, before it was woken", w->name, (long long)(t1 - t0) / 1000);
    late = t1 - at;
  } else if (late < -EARLY_NS) {
    fail("%s: a wait of %ld ms ended after %lld us", w->name, ms, (long long)(t1 - t0) / 1000);
  }
  if (late > max_late_ns)
    fail("%s: a wait of %ld ms ended %lld ms late", w->name, ms, (long long)late / 1000000);
  if (w->nlate < MAXLATE) w->late[w->nlate++] = late;
}

// watchdog names the call that never returns.
static void *watchdog(void *arg) {
  for (;;) {
    sleep_ms(1000);
    for (size_t i = 0; i < NWAITS; i++) {
      int64_t due = atomic_load(&waits[i].due);
      if (due && now_ns() > due + 2 * max_late_ns)
        fail("%s: does not return; a wake was %s", waits[i].name,
             !waits[i].wakes ? "due" : atomic_load(&waits[i].woke_at) ? "sent" : "not sent");
    }
  }
  return arg;
}

static void *wait_main(void *arg) {
  struct wait *w = arg;
  w->tid = syscall(SYS_gettid);
  // Not in the main thread: some kernels bind a signalfd to its creator.
  if (w->init) w->init(w);
  if (w->wakes) {
    int e = pthread_create(&w->waker, NULL, waker_main, w);
    if (e) fail("pthread_create: %s", strerror(e));
  }
  for (;;) {
    pthread_barrier_wait(&barrier);
    int m = atomic_load(&mode);
    if (m == 2) break;
    if (m == 1) {
      one_wait(w, atomic_load(&together_ms));
    } else {
      while (now_ns() < atomic_load(&free_until)) one_wait(w, 1 + below(&w->g, 1 << below(&w->g, 9)));
    }
    pthread_barrier_wait(&barrier);
  }
  if (w->wakes) {
    atomic_store(&w->arm_ms, -1);
    must(sem_post(&w->arm) == 0, "sem_post");
    pthread_join(w->waker, NULL);
  }
  return NULL;
}

static int cmp_i64(const void *a, const void *b) {
  int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return (x > y) - (x < y);
}

static void report(const char *name, int64_t *late, size_t n) {
  if (!n) return;
  qsort(late, n, sizeof *late, cmp_i64);
  char line[256];
  int k = snprintf(line, sizeof line,
                   "{\"call\":\"%s\",\"n\":%zu,\"min_us\":%lld,\"median_us\":%lld,\"p90_us\":%lld,"
                   "\"p99_us\":%lld,\"max_us\":%lld}\n",
                   name, n, (long long)late[0] / 1000, (long long)late[n / 2] / 1000,
                   (long long)late[n * 9 / 10] / 1000, (long long)late[n * 99 / 100] / 1000,
                   (long long)late[n - 1] / 1000);
  must(write(1, line, k) == k, "write");
}

// ---- waits that a signal ends, in a process of their own ----------------------

static volatile sig_atomic_t alarms;
static void on_alarm(int s) {
  (void)s;
  alarms++;
}

static void alarm_in(long ms) {
  struct itimerval it = {.it_value = {ms / 1000, ms % 1000 * 1000}};
  must(setitimer(ITIMER_REAL, &it, NULL) == 0, "setitimer");
}

// signal_child checks the calls whose end is a signal: it must interrupt them
// at its time and not before, with the rest of the sleep reported right, and
// calls that restart must go on.
static void signal_child(int64_t end) {
  prog_name = "blocking signals";
  sigset_t none, alrm;
  sigemptyset(&none);
  sigemptyset(&alrm);
  sigaddset(&alrm, SIGALRM);
  pthread_sigmask(SIG_SETMASK, &none, NULL);
  struct sigaction sa;
  memset(&sa, 0, sizeof sa);
  sa.sa_handler = on_alarm;
  must(sigaction(SIGALRM, &sa, NULL) == 0, "sigaction");
  int q = msgget(IPC_PRIVATE, IPC_CREAT | 0600), p[2];
  must(q >= 0 && pipe(p) == 0, "msgget");
  struct msg *m = map_or_die(2, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  static const char *const names[] = {"msgrcv_alarm", "sigsuspend_alarm", "nanosleep_alarm", "read_restart"};
  static int64_t late[4][4096];
  size_t n[4] = {0};
  struct rng g = {99};
  while (now_ns() < end) {
    int k = below(&g, 4);
    long ms = 20 + below(&g, below(&g, 3) ? 100 : 700);
    // While the others wait together, wait for as long as they do.
    int64_t left = atomic_load(together_until) - now_ns();
    if (left > 200000000) {
      k = below(&g, 3);
      ms = left / 1000000;
    }
    int before = alarms, r = 0;
    sa.sa_flags = k == 3 ? SA_RESTART : 0;
    must(sigaction(SIGALRM, &sa, NULL) == 0, "sigaction");
    if (k == 1) must(sigprocmask(SIG_BLOCK, &alrm, NULL) == 0, "sigprocmask");
    struct timespec rem = {0, 0}, ts = {0, 0};
    pid_t pid = 0;
    if (k == 3) {
      // A child writes at twice the time of the alarm.
      pid = fork();
      must(pid >= 0, "fork");
      if (pid == 0) {
        sleep_ms(2 * ms);
        must(write(p[1], "x", 1) == 1, "write");
        _exit(0);
      }
    }
    int64_t t0 = now_ns(), want = ms;
    alarm_in(ms);
    switch (k) {
      case 0:
        r = msgrcv(q, m, sizeof m->text, 0, 0);
        break;
      case 1:
        r = sigsuspend(&none);
        break;
      case 2:
        ts = (struct timespec){2 * ms / 1000, 2 * ms % 1000 * 1000000};
        r = nanosleep(&ts, &rem);
        break;
      case 3:
        want = 2 * ms;
        r = read(p[0], m, 1);
        if (r != 1) fail("read with SA_RESTART returned %d: %s", r, strerror(errno));
        r = -1;
        errno = EINTR;
        break;
    }
    int64_t l = now_ns() - t0 - want * 1000000;
    if (r != -1 || errno != EINTR) fail("%s returned %d: %s", names[k], r, strerror(errno));
    if (alarms != before + 1) fail("%s: %d alarms", names[k], alarms - before);
    if (l < -EARLY_NS && k != 3) fail("%s: ended %lld us early", names[k], (long long)-l / 1000);
    if (l > max_late_ns) fail("%s: ended %lld ms late", names[k], (long long)l / 1000000);
    if (k == 2) {
      // Time slept plus time left is the time asked for.
      int64_t sum = l + want * 1000000 + rem.tv_sec * 1000000000LL + rem.tv_nsec;
      if (sum < 2 * ms * 1000000 - EARLY_NS) fail("nanosleep: the remaining time is too short");
    }
    if (k == 1) must(sigprocmask(SIG_UNBLOCK, &alrm, NULL) == 0, "sigprocmask");
    if (pid) must(waitpid(pid, NULL, 0) == pid, "waitpid");
    if (n[k] < 4096) late[k][n[k]++] = l;
  }
  must(msgctl(q, IPC_RMID, NULL) == 0, "msgctl");
  for (int k = 0; k < 4; k++) report(names[k], late[k], n[k]);
}

int main(int argc, char **argv) {
  prog_name = "blocking";
  long seconds = opt_num(argc, argv, "seconds", 20);
  long mb = opt_num(argc, argv, "mb", 24);
  max_late_ns = opt_num(argc, argv, "max-late-ms", 5000) * 1000000LL;
  int64_t end = now_ns() + seconds * 1000000000LL;
  install_fault_handlers();

  sigset_t block;
  sigemptyset(&block);
  sigaddset(&block, SIGUSR1);
  sigaddset(&block, SIGUSR2);
  must(pthread_sigmask(SIG_BLOCK, &block, NULL) == 0, "sigmask");

  together_until = map_or_die(1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
  pid_t sig = fork();
  must(sig >= 0, "fork");
  if (sig == 0) {
    signal_child(end);
    _exit(0);
  }

  // Memory that gives a pass something to do.
  struct region ballast;
  struct rng g = {4711};
  region_new(&ballast, R_PRIVATE, mb * 256, 4711, "/dev/shm");
  for (size_t i = 0; i < ballast.n; i++) page_write(&ballast, i);

  pthread_barrier_init(&barrier, NULL, NWAITS + 1);
  for (size_t i = 0; i < NWAITS; i++) {
    struct wait *w = &waits[i];
    w->c = map_or_die(1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    w->data = map_or_die(1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    w->late = calloc(MAXLATE, sizeof *w->late);
    must(w->late, "calloc");
    w->g.s = i;
    sem_init(&w->arm, 0, 0);
    pthread_mutex_init(&w->mu, NULL);
    pthread_cond_init(&w->cond, NULL);
    int e = pthread_create(&w->th, NULL, wait_main, w);
    if (e) fail("pthread_create: %s", strerror(e));
  }
  pthread_t dog;
  must(pthread_create(&dog, NULL, watchdog, NULL) == 0, "pthread_create");
  int rounds = 0;
  while (now_ns() < end) {
    if (rounds % 4 == 3) {
      atomic_store(&mode, 0);
      atomic_store(&free_until, now_ns() + 3000000000LL);
    } else {
      atomic_store(&mode, 1);
      atomic_store(&together_ms, 250 + below(&g, 700));
      atomic_store(together_until, now_ns() + atomic_load(&together_ms) * 1000000);
    }
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
    for (int k = 0; k < 400; k++) {
      page_verify(&ballast, below(&g, ballast.n), "load");
      page_patch(&ballast, below(&g, ballast.n));
    }
    rounds++;
  }
  atomic_store(&mode, 2);
  pthread_barrier_wait(&barrier);
  for (size_t i = 0; i < NWAITS; i++) pthread_join(waits[i].th, NULL);
  int st;
  must(waitpid(sig, &st, 0) == sig, "waitpid");
  if (st) fail("the process that waits for signals ended with status %#x", st);
  region_verify(&ballast, "full check");
  for (size_t i = 0; i < NWAITS; i++) {
    report(waits[i].name, waits[i].late, waits[i].nlate);
    if (waits[i].init == init_sem) semctl(waits[i].id, 0, IPC_RMID);
    if (waits[i].init == init_msg) msgctl(waits[i].id, IPC_RMID, NULL);
  }
  printf("OK blocking calls=%zu rounds=%d unsupported=%s\n", NWAITS + 4, rounds, unsupported_list());
  return 0;
}
