"""One of the processes that run a target together: it joins the group, and serves its supervisor or follows the leader.

main.py            main program
link.py            its end of the connection to the supervisor
private_server.py  its HTTP server, which only the supervisor may use
"""
