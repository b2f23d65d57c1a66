from seatrial.cli import main

main()
